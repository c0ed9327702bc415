"""vLLM's blocks into blobs and back, packed by the store's codec on the host.

The way of a CPU engine, and of any cache that the device's own kernels cannot address
(``device_blocks``): rows are copied out of the blocks, and packed afterwards by the codec's
threads; and unpacked by them, a few pieces ahead of the copying in.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Protocol

from engines.vllm_plugin.transfer import Filling, Packing, Rows
from kvstore.block_store import BlockStore
from kvstore.codecs.base import Codec
from kvstore.errors import Unusable
from kvstore.shapes import KVLayout, KVPair, slice_tokens

logger = logging.getLogger("thermocline.vllm")


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

    def write_part(self, block_id: int, run: Sequence[KVPair]) -> None:
        """``run`` into the first rows of this block; the others stay as they are."""


class Stream(Protocol):
    """In which order copies and the model's work happen (``streams.SideStream``)."""

    def mark(self) -> object: ...
    def after(self, mark: object) -> AbstractContextManager[None]: ...


class SpareRuns:
    """Memory to decode chunks into, used again. Thread-safe.

    A chunk of a small model is megabytes. Memory that is fresh from the system is mapped page by
    page as it is first written, which takes several times as long as decoding into it.

    Args:
        most: runs that are kept.
    """

    def __init__(self, layout: KVLayout, most: int) -> None:
        self._layout = layout
        self._most = most
        self._lock = threading.Lock()
        self._spare: list[list[KVPair]] = []

    def take(self, num_tokens: int) -> list[KVPair]:
        with self._lock:
            run = self._spare.pop() if self._spare else []
        fits = bool(run) and run[0][0].shape[1] == num_tokens
        return run if fits else self._layout.empty(num_tokens)

    def give(self, run: list[KVPair]) -> None:
        """Nobody looks at it any more."""
        with self._lock:
            if len(self._spare) < self._most:
                self._spare.append(run)


class HostBlocks:
    """Implements ``transfer.Blocks``."""

    def __init__(self, pages: Pages, store: BlockStore, stream: Stream) -> None:
        self._pages = pages
        self._store = store
        self._stream = stream
        self._ahead = store.workers.num_threads + 1
        # What one load has in use: decoded ahead, the next one, and one on its way into blocks.
        self._runs = SpareRuns(pages.layout, self._ahead + 2)

    @property
    def block_bytes(self) -> int:
        return self._pages.block_tokens * self._pages.layout.bytes_per_token

    def mark(self) -> object:
        return self._stream.mark()

    def pack(
        self, wanted: Sequence[Packing], ready: object, rows: Rows | None = None
    ) -> list[Future[bytes]]:
        with self._stream.after(ready):
            runs = [self._read(x) for x in wanted]
        if rows is not None:
            pairs = zip(wanted, runs, strict=True)
            rows.update((x.piece, y) for x, y in pairs if x.piece.is_chunk and not x.restored)
        codec, home = self._store.workers.codec, self._store.home_codec
        return [codec(self._packed, x, run, home) for x, run in zip(wanted, runs, strict=True)]

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        filled: set[int] = set()
        for x, future in self._decodes(wanted):
            run = future.result()
            if run is None:
                continue
            with self._stream.after(ready):
                self._write(x, run)
            filled.update(x.block_ids)
            if x.piece.is_chunk:
                self._runs.give(run)
        return filled

    def close(self) -> None:
        """Nothing of its own is held."""

    def _read(self, packing: Packing) -> list[KVPair]:
        """Rows behind a part are of whoever had the block before: they go no further than here."""
        run = self._pages.read(packing.block_ids)
        part_tokens = packing.piece.part_tokens
        return slice_tokens(run, 0, part_tokens) if packing.piece.is_part else run

    def _write(self, filling: Filling, run: list[KVPair]) -> None:
        if filling.piece.is_part:
            self._pages.write_part(filling.block_ids[0], run)
        else:
            self._pages.write(filling.block_ids, run, filling.skip)

    def _packed(self, packing: Packing, run: list[KVPair], home: Codec) -> bytes:
        packer, piece = self._store.packer, packing.piece
        first = piece.first_block * self._pages.block_tokens
        if packing.restored:
            return packer.pack_restored(piece.key, run, first)
        if piece.is_whole_rows:
            return packer.pack_tail(piece.key, run, first)
        return packer.pack_chunk(piece.key, run, first, home)

    def _decodes(
        self, wanted: Sequence[Filling]
    ) -> Iterator[tuple[Filling, Future[list[KVPair] | None]]]:
        """In order, a few begun ahead: decoded, a session is many times what was staged of it."""
        ahead: deque[tuple[Filling, Future[list[KVPair] | None]]] = deque()
        for x in wanted:
            ahead.append((x, self._store.workers.codec(self._decoded, x)))
            if len(ahead) > self._ahead:
                yield ahead.popleft()
        yield from ahead

    def _decoded(self, filling: Filling) -> list[KVPair] | None:
        piece = filling.piece
        tokens = self._store.keys.num_tokens(piece)
        first = piece.first_block * self._pages.block_tokens
        packer = self._store.packer
        unpack = packer.unpack_tail if piece.is_whole_rows else packer.unpack_chunk
        if piece.is_chunk:
            run = self._runs.take(tokens)
        else:
            run = self._pages.layout.empty(filling.part_tokens or tokens)
        try:
            unpack(filling.blob, piece.key, first, tokens, run)
        except Unusable as error:
            logger.warning("a verified blob cannot be decoded: %s", error)
            self._store.discard(piece.key)
            return None
        return run
