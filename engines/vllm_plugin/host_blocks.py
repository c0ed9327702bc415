"""vLLM's blocks into blobs and back, packed by the store's codec on the host.

The way of a CPU engine, and of any cache that the device's own kernels cannot address
(``device_blocks``): rows are copied out of the blocks, and packed afterwards by the codec's
threads; and unpacked by them, a few pieces ahead of the copying in.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Final, Protocol

from engines.vllm_plugin.transfer import Filling, Packing
from kvstore.block_keys import Piece
from kvstore.block_store import BlockStore
from kvstore.errors import Unusable
from kvstore.shapes import KVLayout, KVPair
from kvstore.tiers.base import Blob

logger = logging.getLogger("thermocline.vllm")

DECODES_AHEAD: Final = 4


class Pages(Protocol):
    """vLLM's blocks as runs of tokens (``paging.PagedCache``)."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def block_tokens(self) -> int: ...

    def read(self, block_ids: Sequence[int]) -> list[KVPair]:
        """One run of tokens, copied."""

    def write(self, block_ids: Sequence[int], run: Sequence[KVPair], first_block: int) -> None:
        """Blocks ``first_block ..`` of ``run`` into these blocks."""


class Stream(Protocol):
    """In which order copies and the model's work happen (``streams.SideStream``)."""

    def mark(self) -> object: ...
    def after(self, mark: object) -> AbstractContextManager[None]: ...


class HostBlocks:
    """Implements ``transfer.Blocks``."""

    def __init__(self, pages: Pages, store: BlockStore, stream: Stream) -> None:
        self._pages = pages
        self._store = store
        self._stream = stream

    @property
    def block_bytes(self) -> int:
        return self._pages.block_tokens * self._pages.layout.bytes_per_token

    def mark(self) -> object:
        return self._stream.mark()

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[bytes]]:
        with self._stream.after(ready):
            runs = [self._pages.read(x.block_ids) for x in wanted]
        codec = self._store.workers.codec
        return [codec(self._packed, x.piece, run) for x, run in zip(wanted, runs, strict=True)]

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        filled: set[int] = set()
        for x, future in self._decodes(wanted):
            run = future.result()
            if run is None:
                continue
            with self._stream.after(ready):
                self._pages.write(x.block_ids, run, x.skip)
            filled.update(x.block_ids)
        return filled

    def close(self) -> None:
        """Nothing of its own is held."""

    def _packed(self, piece: Piece, run: list[KVPair]) -> bytes:
        packer = self._store.packer
        pack = packer.pack_tail if piece.is_tail else packer.pack_chunk
        return pack(piece.key, run, piece.first_block * self._pages.block_tokens)

    def _decodes(
        self, wanted: Sequence[Filling]
    ) -> Iterator[tuple[Filling, Future[list[KVPair] | None]]]:
        """In order, a few begun ahead: decoded, a session is many times what was staged of it."""
        ahead: deque[tuple[Filling, Future[list[KVPair] | None]]] = deque()
        for x in wanted:
            ahead.append((x, self._store.workers.codec(self._decoded, x.piece, x.blob)))
            if len(ahead) > DECODES_AHEAD:
                yield ahead.popleft()
        yield from ahead

    def _decoded(self, piece: Piece, blob: Blob) -> list[KVPair] | None:
        tokens = piece.num_blocks * self._pages.block_tokens
        first = piece.first_block * self._pages.block_tokens
        packer = self._store.packer
        unpack = packer.unpack_tail if piece.is_tail else packer.unpack_chunk
        run = self._pages.layout.empty(tokens)
        try:
            unpack(blob, piece.key, first, tokens, run)
        except Unusable as error:
            logger.warning("a verified blob cannot be decoded: %s", error)
            self._store.discard(piece.key)
            return None
        return run
