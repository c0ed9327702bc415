"""Makes blobs from vLLM's blocks and fills blocks from blobs, on the device that holds them.

Saving: kernels gather rows from blocks and pack them on the device, one copy takes the packed rows
(a fifth of the bytes) to pinned host memory, and a codec thread makes the blob. Loading: a codec
thread checks a blob and puts it into pinned memory, one copy takes it to the device, and kernels
unpack it into the blocks. Each direction has a stream of its own; no work is queued on the model's
stream, and that stream never waits (docs/decisions/0023-device-transfer.md).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from torch import Tensor

from engines.vllm_plugin.blocks.blocks import Filling, Packing
from engines.vllm_plugin.blocks.paging import PagedCache
from engines.vllm_plugin.device.accelerator import Accelerator, Region, StagingRing
from engines.vllm_plugin.device.copy_stream import Batch, CopyStream, InFlight
from engines.vllm_plugin.device.staging_layout import KeptRows, StagingLayout
from kvstore.blobs.chain import Piece
from kvstore.errors import Unusable
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Blob

logger = logging.getLogger("thermocline.vllm")
OPENED_AHEAD: Final = 4
NOT_WANTED: Final = -1  # the id of a block that kernels skip
# For each blob of a batch: the rows that its part of the region cannot hold; None = unusable blob.
Opening: TypeAlias = list[Future[list[KeptRows] | None]]


class DeviceSave:
    """Makes blobs from blocks; codec threads seal those that the device has packed.

    Used once, by the thread that calls ``run``.
    """

    def __init__(self, copy_stream: CopyStream) -> None:
        self._copy_stream = copy_stream
        self._in_flight: deque[InFlight[Packing]] = deque()
        self._sealing: list[Future[Blob]] = []

    def run(self, wanted: Sequence[Packing], ready: object) -> list[Future[Blob]]:
        """Read blocks after the mark ``ready``; return a future for each blob, in order.

        The blocks may be reused when this returns; see ``blocks.Blocks.pack``.
        """
        try:
            with self._copy_stream.side_stream.enqueue_after(ready):
                self._read_all(wanted)
        finally:
            self._give_up()
        return self._sealing

    def _read_all(self, wanted: Sequence[Packing]) -> None:
        blocks = self._copy_stream.table([i for x in wanted for i in x.block_ids])
        for batch in self._copy_stream.batches(wanted):
            copy = InFlight(batch, self._take_region(batch))
            self._in_flight.append(copy)
            self._read(copy, blocks)
        while self._in_flight:
            self._finish_oldest()

    def _read(self, copy: InFlight[Packing], blocks: Tensor) -> None:
        stream = self._copy_stream.side_stream
        first, *_ = copy.batch.runs(blocks)
        stream.ask(partial(copy.batch.layout.read, first, copy.region.device))
        stream.ask(copy.region.download)
        copy.wait_done = stream.completion()

    def _take_region(self, batch: Batch[Packing]) -> Region:
        """Take a region. Wait for other threads only while holding none: two could deadlock."""
        nbytes, count = batch.layout.nbytes, len(batch.blobs)
        while True:
            wait = not self._in_flight
            region = self._copy_stream.ring.take(nbytes, count, num_users=count, wait=wait)
            if region is not None:
                return region
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        copy = self._in_flight[0]
        assert copy.wait_done is not None
        copy.wait_done()
        layout = copy.batch.layout
        arrays = copy.region.arrays(layout.nbytes)
        rescued = [
            layout.rescue(x.block_ids, staged)
            for x, staged in zip(copy.batch.blobs, arrays, strict=True)
        ]
        self._in_flight.popleft()
        rest = len(arrays)
        try:
            for x, staged, rows in zip(copy.batch.blobs, arrays, rescued, strict=True):
                seal = partial(self._seal, copy, x.piece, staged, rows)
                self._sealing.append(self._copy_stream.store.workers.codec(seal))
                rest -= 1
        finally:  # parts are left only if the codec threads accept no more work
            self._give_back(copy, rest)

    def _seal(
        self, copy: InFlight[Packing], piece: Piece, staged: np.ndarray, rescued: bytes
    ) -> Blob:
        try:
            return copy.batch.layout.seal(piece, staged, rescued)
        finally:
            self._copy_stream.ring.give_back(copy.region)

    def _give_up(self) -> None:
        """Return the regions that an error left in use, once the device has finished with them.

        This must wait, because vLLM may reuse the blocks at once.
        """
        try:
            if self._in_flight:
                self._copy_stream.side_stream.drain()
        finally:
            for copy in self._in_flight:
                self._give_back(copy, len(copy.batch.blobs))

    def _give_back(self, copy: InFlight[Packing], num_users: int) -> None:
        for _ in range(num_users):
            self._copy_stream.ring.give_back(copy.region)


class DeviceLoad:
    """Fills blocks from blobs; codec threads check the next blobs meanwhile.

    Used once, by the thread that calls ``run``.
    """

    def __init__(self, copy_stream: CopyStream, block_tokens: int) -> None:
        self._copy_stream = copy_stream
        self._block_tokens = block_tokens
        self._opening: deque[tuple[InFlight[Filling], Opening]] = deque()
        self._in_flight: deque[InFlight[Filling]] = deque()
        self._filled: set[int] = set()

    def run(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        """Fill blocks after the mark ``ready``; return the ids of those that were filled.

        An unusable blob fills no blocks; see ``blocks.Blocks.fill``.
        """
        try:
            with self._copy_stream.side_stream.enqueue_after(ready):
                self._write_all(wanted)
        finally:
            self._give_up()
        return self._filled

    def _write_all(self, wanted: Sequence[Filling]) -> None:
        size = self._block_tokens
        blocks = self._copy_stream.table([i for x in wanted for i in _all_blocks(x, size)])
        for batch in self._copy_stream.batches(wanted):
            copy = InFlight(batch, self._take_region(batch, blocks))
            self._opening.append((copy, self._open_all(copy)))
            if sum(len(x.batch.blobs) for x, _ in self._opening) > OPENED_AHEAD + len(batch.blobs):
                self._write(blocks)
        while self._opening:
            self._write(blocks)
        while self._in_flight:
            self._finish_oldest()

    def _take_region(self, batch: Batch[Filling], blocks: Tensor) -> Region:
        """Take a region. Wait for other threads only while holding none: two could deadlock."""
        nbytes, count = batch.layout.nbytes, len(batch.blobs)
        while True:
            holding = bool(self._opening or self._in_flight)
            region = self._copy_stream.ring.take(nbytes, count, wait=not holding)
            if region is not None:
                return region
            if self._in_flight:
                self._finish_oldest()
            else:
                self._write(blocks)

    def _open_all(self, copy: InFlight[Filling]) -> Opening:
        arrays = copy.region.arrays(copy.batch.layout.nbytes)
        codec = self._copy_stream.store.workers.codec
        return [
            codec(self._open, copy.batch.layout, x, staged)
            for x, staged in zip(copy.batch.blobs, arrays, strict=True)
        ]

    def _open(
        self, layout: StagingLayout, filling: Filling, staged: np.ndarray
    ) -> list[KeptRows] | None:
        """Open a blob into its part of a region, on a codec thread; None if it is unusable.

        An unusable blob is discarded, so that it is not offered again.
        """
        piece = filling.piece
        try:
            return layout.open(filling.blob, piece, staged)
        except Unusable as error:
            logger.warning("a verified blob cannot be decoded: %s", error)
            self._copy_stream.store.discard(piece.key)
            return None

    def _write(self, blocks: Tensor) -> None:
        copy, opening = self._opening[0]
        opened = [x.result() for x in opening]
        self._opening.popleft()
        self._in_flight.append(copy)
        stream, layout = self._copy_stream.side_stream, copy.batch.layout
        runs = copy.batch.runs(blocks)
        usable = [i for i, kept in enumerate(opened) if kept is not None]
        if usable:
            stream.ask(copy.region.upload)
        if len(usable) == len(opened):
            stream.ask(partial(layout.write, runs[0], copy.region.device))
        else:
            for i in usable:
                stream.ask(partial(layout.write, runs[i], copy.region.device[i : i + 1]))
        for i in usable:
            if kept := opened[i]:
                stream.ask(partial(layout.write_kept, runs[i], kept))
            self._filled.update(copy.batch.blobs[i].block_ids)
        copy.wait_done = stream.completion()

    def _finish_oldest(self) -> None:
        copy = self._in_flight[0]
        assert copy.wait_done is not None
        copy.wait_done()
        self._in_flight.popleft()
        self._copy_stream.ring.give_back(copy.region)

    def _give_up(self) -> None:
        """Return the regions that an error left in use, once no thread and no kernel uses them."""
        try:
            if self._opening or self._in_flight:
                wait([x for _, opening in self._opening for x in opening])
                self._copy_stream.side_stream.drain()
        finally:
            for copy in (*self._in_flight, *(copy for copy, _ in self._opening)):
                self._copy_stream.ring.give_back(copy.region)


def _all_blocks(x: Filling, block_tokens: int) -> list[int]:
    """Return the ids of all blocks of the blob, ``NOT_WANTED`` for those that are not filled."""
    rest = x.piece.num_tokens // block_tokens - x.skip - len(x.block_ids)
    return [NOT_WANTED] * x.skip + x.block_ids + [NOT_WANTED] * rest


class DeviceBlocks:
    """Implements ``checked_blocks.DeviceTransfer``.

    Args:
        layout_of: chooses the staging layout of a blob; ``StagingLayouts.of``.
        staging_bytes: for each direction; at least the size of two whole chunks is allocated.
    """

    def __init__(
        self,
        cache: PagedCache,
        layout_of: Callable[[Piece], StagingLayout],
        store: ColdStore,
        accelerator: Accelerator,
        staging_bytes: int,
    ) -> None:
        self._cache = cache
        chunk_bytes = store.chunk_tokens * cache.layout.bytes_per_token
        nbytes = max(staging_bytes, 2 * chunk_bytes)
        self._saving, self._loading = (
            CopyStream(
                store=store,
                layout_of=layout_of,
                ring=StagingRing(nbytes, accelerator),
                side_stream=accelerator.stream(),
                device=cache.device,
            )
            for _ in ("saving", "loading")
        )

    @property
    def block_bytes(self) -> int:
        """The size of a block of all layers, in the engine's dtype."""
        return self._cache.block_tokens * self._cache.layout.bytes_per_token

    def mark(self) -> object:
        """Return a mark of the work queued so far on the device; called on the model's thread."""
        return self._saving.side_stream.mark()

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[Blob]]:
        """Make blobs from blocks; see ``blocks.Blocks.pack``."""
        return DeviceSave(self._saving).run(wanted, ready) if wanted else []

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        """Fill blocks from blobs; see ``blocks.Blocks.fill``."""
        return (
            DeviceLoad(self._loading, self._cache.block_tokens).run(wanted, ready)
            if wanted
            else set()
        )

    def close(self) -> None:
        """Wait until the device is done."""
        self._saving.side_stream.drain()
        self._loading.side_stream.drain()
