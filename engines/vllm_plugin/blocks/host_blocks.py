"""Packs vLLM's blocks into blobs and unpacks them, with the store's codec on the host.

It is used on CPU engines, and for every cache that the device's own kernels (``device_blocks``)
cannot address. A save copies rows out of the blocks, and the store's codec threads pack them
afterwards. In a load these threads unpack a few blobs ahead, and the rows are copied into blocks.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from engines.vllm_plugin.blocks.blocks import Filling, Packing, Stream
from kvstore.errors import Unusable
from kvstore.shapes import KVLayout, KVPair, slice_tokens
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Blob
from kvstore.workers import Task

if TYPE_CHECKING:
    from engines.vllm_plugin.blocks.paging import PagedCache

logger = logging.getLogger("thermocline.vllm")

# Small chunks are copied together, because each copy costs a call per layer.
GROUP_TOKENS: Final = 128
SPARE_BYTES: Final = 256 << 20


# The unpacked chunks of a group in one run, and for each chunk whether unpacking succeeded.
Decoded: TypeAlias = tuple[list[KVPair], list[bool]]
Ahead: TypeAlias = tuple[list[Filling], Task[Decoded]]


class RunPool:
    """Keeps memory for unpacked chunks, so that it is reused. Thread-safe.

    A chunk of a small model takes megabytes. The system maps new memory page by page when it is
    first written, which takes several times as long as unpacking into it.

    Args:
        most: the most runs that are kept.
        most_bytes: the most bytes of all kept runs. A run of a large model takes tens of megabytes,
            and memory that is idle here cannot be used elsewhere.
    """

    def __init__(self, layout: KVLayout, most: int, most_bytes: int) -> None:
        self._layout = layout
        self._most = most
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._spare: list[list[KVPair]] = []
        self.nbytes = 0  # of the runs that are kept now

    def take(self, num_tokens: int) -> list[KVPair]:
        """Return a run of ``num_tokens`` for the caller's exclusive use; its rows are undefined."""
        with self._lock:
            run = self._spare.pop() if self._spare else []
            self.nbytes -= _nbytes_of(run)
        fits = bool(run) and run[0][0].shape[1] == num_tokens
        return run if fits else self._layout.empty(num_tokens)

    def give(self, run: list[KVPair]) -> None:
        """Take back a run that the caller no longer reads; it is kept if there is room."""
        nbytes = _nbytes_of(run)
        with self._lock:
            if len(self._spare) < self._most and self.nbytes + nbytes <= self._most_bytes:
                self._spare.append(run)
                self.nbytes += nbytes


def _nbytes_of(run: Sequence[KVPair]) -> int:
    return sum(array.nbytes for pair in run for array in pair)


class HostBlocks:
    """Implements ``blocks.Blocks``.

    Args:
        spare_bytes: the most memory for unpacking that is kept between loads.
        why_host: see ``Blocks``; for a cache in host memory "".
    """

    def __init__(
        self,
        cache: PagedCache,
        store: ColdStore,
        stream: Stream,
        spare_bytes: int = SPARE_BYTES,
        why_host: str = "",
    ) -> None:
        self.why_host = why_host
        self._cache = cache
        self._store = store
        self._stream = stream
        self._chunk_tokens = store.chunk_tokens
        self._chunk_blocks = store.chunk_tokens // cache.block_tokens
        self._group_tokens = max(GROUP_TOKENS // self._chunk_tokens, 1) * self._chunk_tokens
        self._ahead = store.workers.num_threads + 1
        # One load uses the runs unpacked ahead, the next one, and one being copied into blocks.
        self._runs = RunPool(cache.layout, self._ahead + 2, spare_bytes)

    @property
    def block_bytes(self) -> int:
        return self._cache.block_tokens * self._cache.layout.bytes_per_token

    def mark(self) -> object:
        return self._stream.mark()

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[Blob]]:
        with self._stream.after(ready):
            runs = [self._cache.read(x.block_ids) for x in wanted]
        codec, pack = self._store.workers.codec, self._store.packer.pack_rows
        return [codec(pack, x.piece, run) for x, run in zip(wanted, runs, strict=True)]

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        filled: set[int] = set()
        for group, (run, decoded) in self._decodes(wanted):
            with self._stream.after(ready):
                for first, fillings in _stretches(group, decoded):
                    block_ids = [x for filling in fillings for x in filling.block_ids]
                    at = first * self._chunk_blocks + fillings[0].skip
                    self._cache.write(block_ids, run, at)
                    filled.update(block_ids)
            self._runs.give(run)
        return filled

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def _decodes(self, wanted: Sequence[Filling]) -> Iterator[tuple[list[Filling], Decoded]]:
        """Yield the blobs in order, in groups, with their unpacked runs.

        Only a few groups are unpacked ahead: an unpacked session takes many times the memory of its
        staged blobs.
        """
        ahead: deque[Ahead] = deque()
        most = self._group_tokens // self._chunk_tokens
        for group in _groups(wanted, most, self._cache.block_tokens):
            ahead.append((group, Task(self._store.workers, partial(self._decoded, group))))
            if len(ahead) > self._ahead:
                yield self._first(ahead)
        while ahead:
            yield self._first(ahead)

    def _first(self, ahead: deque[Ahead]) -> tuple[list[Filling], Decoded]:
        """Return the next group and its unpacked run.

        Until it is ready, this thread unpacks groups that the codec threads have not begun, because
        entropy decoding takes ten times as long as copying.
        """
        group, wanted = ahead[0]
        while not wanted.future.done() and any(task.take() for _, task in ahead):
            pass
        ahead.popleft()
        return group, wanted.future.result()

    def _decoded(self, group: Sequence[Filling]) -> Decoded:
        run, size = self._runs.take(self._group_tokens), self._chunk_tokens
        try:
            chunks = [(x.blob, x.piece) for x in group]
            self._store.packer.unpack_chunks(chunks, slice_tokens(run, 0, len(group) * size))
            return run, [True] * len(group)
        except Unusable:  # some chunk is bad: unpack each by itself, to keep the good ones
            slices = [slice_tokens(run, i * size, (i + 1) * size) for i in range(len(group))]
            return run, [self._unpacked(x, y) for x, y in zip(group, slices, strict=True)]

    def _unpacked(self, filling: Filling, out: list[KVPair]) -> bool:
        try:
            self._store.packer.unpack_rows(filling.blob, filling.piece, out)
        except Unusable as error:
            logger.warning("a verified blob cannot be decoded: %s", error)
            self._store.discard(filling.piece.key)
            return False
        return True


def _groups(wanted: Sequence[Filling], most: int, block_tokens: int) -> Iterator[list[Filling]]:
    """Yield groups of up to ``most`` consecutive chunks.

    In all chunks of a group but the last, the blocks are wanted up to the chunk's end.
    """
    group: list[Filling] = []
    for x in wanted:
        if group and not (len(group) < most and _continues(group[-1], x, block_tokens)):
            yield group
            group = []
        group.append(x)
    if group:
        yield group


def _continues(one: Filling, other: Filling, block_tokens: int) -> bool:
    """Return whether the blocks wanted of ``other`` directly follow those wanted of ``one``."""
    wanted_tokens = (one.skip + len(one.block_ids)) * block_tokens
    to_its_end = wanted_tokens == one.piece.num_tokens
    return to_its_end and one.piece.end_token == other.piece.first_token and not other.skip


def _stretches(
    group: Sequence[Filling], decoded: Sequence[bool]
) -> Iterator[tuple[int, Sequence[Filling]]]:
    """Yield each run of consecutive unpacked members of a group, with its first member's index."""
    first = 0
    for is_good, items in itertools.groupby(decoded):
        end = first + len(list(items))
        if is_good:
            yield first, group[first:end]
        first = end
