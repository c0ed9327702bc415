"""vLLM's blocks into blobs and back, packed by the store's codec on the host.

The way of a CPU engine, and of any cache that the device's own kernels cannot address
(``device_blocks``): rows are copied out of the blocks, and packed afterwards by the codec's
threads; and unpacked by them, a few pieces ahead of the copying in.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from engines.vllm_plugin.transfer import Filling, Packing, Rows
from kvstore.block_store import BlockStore
from kvstore.codecs.base import Codec
from kvstore.errors import Unusable
from kvstore.shapes import KVLayout, KVPair, slice_tokens

logger = logging.getLogger("thermocline.vllm")

# Small chunks are copied together: each copy sets out for every layer.
GROUP_TOKENS: Final = 128
SPARE_BYTES: Final = 256 << 20


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


# A run of all fillings of a group, side by side, and which of them are really in it.
Decoded: TypeAlias = tuple[list[KVPair], list[bool]]


@dataclass
class _Begun:
    group: list[Filling]
    future: Future[Decoded]


class SpareRuns:
    """Memory to decode chunks into, used again. Thread-safe.

    A chunk of a small model is megabytes. Memory that is fresh from the system is mapped page by
    page as it is first written, which takes several times as long as decoding into it.

    Args:
        most: runs that are kept.
        most_bytes: of all that are kept. Of a large model a run is tens of megabytes, and what
            lies here idle is missing elsewhere.
    """

    def __init__(self, layout: KVLayout, most: int, most_bytes: int) -> None:
        self._layout = layout
        self._most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._spare: list[list[KVPair]] = []
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def take(self, num_tokens: int) -> list[KVPair]:
        with self._lock:
            run = self._spare.pop() if self._spare else []
            self._nbytes -= _nbytes_of(run)
        fits = bool(run) and run[0][0].shape[1] == num_tokens
        return run if fits else self._layout.empty(num_tokens)

    def give(self, run: list[KVPair]) -> None:
        """Nobody looks at it any more."""
        nbytes = _nbytes_of(run)
        with self._lock:
            if len(self._spare) < self._most and self._nbytes + nbytes <= self._most_bytes:
                self._spare.append(run)
                self._nbytes += nbytes


class HostBlocks:
    """Implements ``transfer.Blocks``.

    Args:
        spare_bytes: of memory to decode into that is kept between loads.
    """

    def __init__(
        self, pages: Pages, store: BlockStore, stream: Stream, spare_bytes: int = SPARE_BYTES
    ) -> None:
        self._pages = pages
        self._store = store
        self._stream = stream
        self._keys = store.keys
        self._chunk_tokens = store.keys.chunk_blocks * pages.block_tokens
        self._group_tokens = max(GROUP_TOKENS // self._chunk_tokens, 1) * self._chunk_tokens
        self._ahead = store.workers.num_threads + 1
        # What one load has in use: decoded ahead, the next one, and one on its way into blocks.
        self._runs = SpareRuns(pages.layout, self._ahead + 2, spare_bytes)

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
        for group, (run, decoded) in self._decodes(wanted):
            with self._stream.after(ready):
                for first, fillings in _stretches(group, decoded):
                    self._write(fillings, run, first * self._keys.chunk_blocks)
                    filled.update(x for filling in fillings for x in filling.block_ids)
            if group[0].piece.is_chunk:
                self._runs.give(run)
        return filled

    def close(self) -> None:
        """Nothing of its own is held."""

    def _read(self, packing: Packing) -> list[KVPair]:
        """Rows behind a part are of whoever had the block before: they go no further than here."""
        run = self._pages.read(packing.block_ids)
        part_tokens = packing.piece.part_tokens
        return slice_tokens(run, 0, part_tokens) if packing.piece.is_part else run

    def _write(self, fillings: Sequence[Filling], run: list[KVPair], first_block: int) -> None:
        first = fillings[0]
        if first.piece.is_part:
            self._pages.write_part(first.block_ids[0], run)
        else:
            block_ids = [x for filling in fillings for x in filling.block_ids]
            self._pages.write(block_ids, run, first_block + first.skip)

    def _packed(self, packing: Packing, run: list[KVPair], home: Codec) -> bytes:
        packer, piece = self._store.packer, packing.piece
        first = piece.first_block * self._pages.block_tokens
        if packing.restored:
            return packer.pack_restored(piece.key, run, first)
        if piece.is_whole_rows:
            return packer.pack_tail(piece.key, run, first)
        return packer.pack_chunk(piece.key, run, first, home)

    def _decodes(self, wanted: Sequence[Filling]) -> Iterator[tuple[list[Filling], Decoded]]:
        """In order, a few begun ahead: decoded, a session is many times what was staged of it."""
        ahead: deque[_Begun] = deque()
        for group in _groups(wanted, self._group_tokens // self._chunk_tokens):
            ahead.append(_Begun(group, self._store.workers.codec(self._decoded, group)))
            if len(ahead) > self._ahead:
                yield self._first(ahead)
        while ahead:
            yield self._first(ahead)

    def _first(self, ahead: deque[_Begun]) -> tuple[list[Filling], Decoded]:
        """While the codec's threads are not done with it, this one decodes what they have not
        begun: an entropy coder takes ten times as long as copying does."""
        while not ahead[0].future.done():
            waiting = next((x for x in ahead if x.future.cancel()), None)
            if waiting is None:
                break
            waiting.future = Future()
            waiting.future.set_result(self._decoded(waiting.group))
        first = ahead.popleft()
        return first.group, first.future.result()

    def _decoded(self, group: Sequence[Filling]) -> Decoded:
        if not group[0].piece.is_chunk:
            (filling,) = group
            tokens = filling.part_tokens or self._keys.num_tokens(filling.piece)
            run = self._pages.layout.empty(tokens)
            return run, [self._unpacked(filling, run)]
        run, size = self._runs.take(self._group_tokens), self._chunk_tokens
        slices = [slice_tokens(run, i * size, (i + 1) * size) for i in range(len(group))]
        return run, [self._unpacked(x, y) for x, y in zip(group, slices, strict=True)]

    def _unpacked(self, filling: Filling, out: list[KVPair]) -> bool:
        piece, packer = filling.piece, self._store.packer
        unpack = packer.unpack_tail if piece.is_whole_rows else packer.unpack_chunk
        first = piece.first_block * self._pages.block_tokens
        try:
            unpack(filling.blob, piece.key, first, self._keys.num_tokens(piece), out)
        except Unusable as error:
            logger.warning("a verified blob cannot be decoded: %s", error)
            self._store.discard(piece.key)
            return False
        return True


def _nbytes_of(run: Sequence[KVPair]) -> int:
    return sum(array.nbytes for pair in run for array in pair)


def _groups(wanted: Sequence[Filling], most: int) -> Iterator[list[Filling]]:
    """Chunks that follow each other, ``most`` together; of all but the last, every block."""
    group: list[Filling] = []
    for x in wanted:
        if group and not (len(group) < most and _go_on(group[-1], x)):
            yield group
            group = []
        group.append(x)
    if group:
        yield group


def _go_on(one: Filling, other: Filling) -> bool:
    """The blocks of ``other`` are wanted right behind those of ``one``."""
    if not (one.piece.is_chunk and other.piece.is_chunk):
        return False
    to_its_end = one.piece.first_block + one.skip + len(one.block_ids) == one.piece.end_block
    return to_its_end and one.piece.end_block == other.piece.first_block and not other.skip


def _stretches(
    group: Sequence[Filling], decoded: Sequence[bool]
) -> Iterator[tuple[int, Sequence[Filling]]]:
    """What was decoded, with nothing between that was not, and the number of the first."""
    first = 0
    for is_good, items in itertools.groupby(decoded):
        end = first + len(list(items))
        if is_good:
            yield first, group[first:end]
        first = end
