"""Chooses between the device's kernels, for the codec they were checked with, and the host.

A store may pack with another codec for a slower tier, adopt one while it runs, and hold blobs of
one that it used before. Kernels are checked at the start, for one codec; blobs of another codec,
and blobs whose unpacked rows the caller wants too, are left to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from engines.vllm_plugin.worker.transfer import Blocks, Filling, Packing, Rows
from kvstore.blobs.format import codec_in
from kvstore.by_blocks.store import BlockStore


class DeviceTransfer(Protocol):
    """The part of ``transfer.Blocks`` that a device does, for one codec."""

    def mark(self) -> object:
        """Remember what has been asked of the device so far, on the model's thread."""

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[bytes]]:
        """Make blobs of blocks; see ``transfer.Blocks.pack``."""

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        """Fill blocks out of blobs; see ``transfer.Blocks.fill``."""

    def close(self) -> None:
        """Wait until the device is done."""


class CheckedBlocks:
    """Implements ``transfer.Blocks``.

    Args:
        store: its present codec is the one that the kernels were checked with.
    """

    def __init__(self, on_device: DeviceTransfer, on_host: Blocks, store: BlockStore) -> None:
        self._on_device = on_device
        self._on_host = on_host
        self._store = store
        self._codec = store.packer.codec.id

    @property
    def block_bytes(self) -> int:
        return self._on_host.block_bytes

    def mark(self) -> object:
        """Remember what the model has asked of the device so far; good for both."""
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
                (x.span for x in (*kept, *rest)),
                (*self._on_host.pack(kept, ready), *self._on_device.pack(rest, ready)),
                strict=True,
            )
        )
        return [futures[x.span] for x in wanted]

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        by_device = [x for x in wanted if self._is_for_device(x)]
        by_host = [x for x in wanted if not self._is_for_device(x)]
        filled = self._on_device.fill(by_device, ready)
        return filled | (self._on_host.fill(by_host, ready) if by_host else set())

    def close(self) -> None:
        self._on_device.close()
        self._on_host.close()

    def _is_for_device(self, filling: Filling) -> bool:
        return filling.span.is_tail or codec_in(filling.blob) == self._codec.encode()
