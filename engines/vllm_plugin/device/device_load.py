"""One load on the device: blobs pass through the ring into the blocks, a few at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from torch import Tensor

from engines.vllm_plugin.blocks.blocks import Filling
from engines.vllm_plugin.device.copy_stream import Batch, CopyStream, InFlight
from engines.vllm_plugin.device.layouts.kept_rows import KeptRows
from engines.vllm_plugin.device.layouts.staging_layout import StagingLayout
from engines.vllm_plugin.device.staging import Region
from kvstore.errors import Unusable

logger = logging.getLogger("thermocline.vllm")

OPENED_AHEAD: Final = 4
NOT_WANTED: Final = -1  # the id of a block that kernels skip


# A row for each blob of a batch: the rows that its part cannot hold; None for an unusable blob.
Opening: TypeAlias = list[Future[list[KeptRows] | None]]


class DeviceLoad:
    """Fills blocks from blobs; codec threads check the next blobs meanwhile.

    Used once, by the thread that calls ``run``.
    """

    def __init__(self, copy_stream: CopyStream) -> None:
        self._copy_stream = copy_stream
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
        blocks = self._copy_stream.table([i for x in wanted for i in _all_blocks(x)])
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
        span = filling.span
        try:
            return layout.open(filling.blob, span, staged)
        except Unusable as error:
            logger.warning("a verified blob cannot be decoded: %s", error)
            self._copy_stream.store.discard(span.key)
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
        """Return regions after an error, once no thread and no kernel uses them."""
        try:
            if self._opening or self._in_flight:
                wait([x for _, opening in self._opening for x in opening])
                self._copy_stream.side_stream.drain()
        finally:
            for copy in (*self._in_flight, *(copy for copy, _ in self._opening)):
                self._copy_stream.ring.give_back(copy.region)


def _all_blocks(x: Filling) -> list[int]:
    """Return the ids of all blocks of the blob, ``NOT_WANTED`` for those not to be filled."""
    rest = x.span.num_blocks - x.skip - len(x.block_ids)
    return [NOT_WANTED] * x.skip + x.block_ids + [NOT_WANTED] * rest
