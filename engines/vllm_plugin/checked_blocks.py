"""The device's kernels for the codec that they were checked with, the host for everything else.

A store may pack by another codec for a slower tier, adopt one while it runs, and hold blobs in one
that it used before. Kernels prove themselves at the start, for one codec; whatever is in another,
or has to be there as rows besides, is packed and unpacked by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from engines.vllm_plugin.transfer import Blocks, Filling, Packing, Rows
from kvstore.block_store import BlockStore
from kvstore.format import codec_in


class DeviceWay(Protocol):
    """Of ``transfer.Blocks``, what the device does of it."""

    def mark(self) -> object: ...

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[bytes]]: ...

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]: ...

    def close(self) -> None: ...


class CheckedBlocks:
    """Implements ``transfer.Blocks``."""

    def __init__(self, on_device: DeviceWay, on_host: Blocks, store: BlockStore) -> None:
        """``store`` has the codec now that the kernels were checked with."""
        self._on_device = on_device
        self._on_host = on_host
        self._store = store
        self._codec = store.packer.codec.id

    @property
    def block_bytes(self) -> int:
        return self._on_host.block_bytes

    def mark(self) -> object:
        """One for both: an event behind what the model has asked of the device."""
        return self._on_device.mark()

    def pack(
        self, wanted: Sequence[Packing], ready: object, rows: Rows | None = None
    ) -> list[Future[bytes]]:
        if rows is not None or self._store.home_codec.id != self._codec:
            return self._on_host.pack(wanted, ready, rows)
        kept = [x for x in wanted if x.restored]
        rest = [x for x in wanted if not x.restored]
        futures = dict(
            zip(
                (x.piece for x in (*kept, *rest)),
                (*self._on_host.pack(kept, ready), *self._on_device.pack(rest, ready)),
                strict=True,
            )
        )
        return [futures[x.piece] for x in wanted]

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        by_device = [x for x in wanted if self._is_for_device(x)]
        by_host = [x for x in wanted if not self._is_for_device(x)]
        filled = self._on_device.fill(by_device, ready)
        return filled | (self._on_host.fill(by_host, ready) if by_host else set())

    def close(self) -> None:
        self._on_device.close()
        self._on_host.close()

    def _is_for_device(self, filling: Filling) -> bool:
        return filling.piece.is_tail or codec_in(filling.blob) == self._codec.encode()
