"""One load on the device: blobs pass one after the other through the ring into the blocks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Final

from torch import Tensor

from engines.vllm_plugin.blocks.blocks import Filling
from engines.vllm_plugin.device.copy_stream import CopyStream, InFlight
from engines.vllm_plugin.device.layouts.kept_rows import KeptRows
from engines.vllm_plugin.device.layouts.staging_layout import StagingLayout
from engines.vllm_plugin.device.staging import Region
from kvstore.blobs.packer import AnyBlob
from kvstore.errors import Unusable

logger = logging.getLogger("thermocline.vllm")

OPENED_AHEAD: Final = 4
NOT_WANTED: Final = -1  # the id of a block that kernels skip


class DeviceLoad:
    """Fills blocks from blobs; codec threads check the next blobs meanwhile.

    Used once, by the thread that calls ``run``.
    """

    def __init__(self, copy_stream: CopyStream) -> None:
        self._copy_stream = copy_stream
        self._opening: deque[tuple[InFlight, Future[list[KeptRows] | None]]] = deque()
        self._in_flight: deque[InFlight] = deque()
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
        first = 0
        for x in wanted:
            layout = self._copy_stream.layout_of(x.span)
            copy = InFlight(layout, self._take_region(layout, blocks), x.span, first, x.block_ids)
            opening = self._copy_stream.store.workers.codec(self._open, copy, x.blob)
            self._opening.append((copy, opening))
            if len(self._opening) > OPENED_AHEAD:
                self._write(blocks)
            first += x.span.num_blocks * self._copy_stream.store.keys.block_tokens
        while self._opening:
            self._write(blocks)
        while self._in_flight:
            self._finish_oldest()

    def _take_region(self, layout: StagingLayout, blocks: Tensor) -> Region:
        """Take a region. Wait for other threads only while holding none: two could deadlock."""
        while True:
            holding = bool(self._opening or self._in_flight)
            region = self._copy_stream.ring.take(layout.nbytes, wait=not holding)
            if region is not None:
                return region
            if self._in_flight:
                self._finish_oldest()
            else:
                self._write(blocks)

    def _open(self, copy: InFlight, blob: AnyBlob) -> list[KeptRows] | None:
        """Open a blob into its region, on a codec thread; None if the blob is unusable.

        An unusable blob is discarded, so that it is not offered again.
        """
        span = copy.span
        try:
            first = self._copy_stream.first_token(span)
            return copy.layout.open(blob, span, first, copy.region.array)
        except Unusable as error:
            logger.warning("a verified blob cannot be decoded: %s", error)
            self._copy_stream.store.discard(span.key)
            return None

    def _write(self, blocks: Tensor) -> None:
        copy, opening = self._opening[0]
        kept = opening.result()
        self._opening.popleft()
        self._in_flight.append(copy)
        if kept is not None:
            run = self._copy_stream.run_of(copy, blocks)
            self._copy_stream.side_stream.ask(copy.region.upload)
            write = partial(copy.layout.write, run, copy.region.device, kept)
            self._copy_stream.side_stream.ask(write)
            self._filled.update(copy.block_ids)
        copy.wait_done = self._copy_stream.side_stream.completion()

    def _finish_oldest(self) -> None:
        copy = self._in_flight[0]
        assert copy.wait_done is not None
        copy.wait_done()
        self._in_flight.popleft()
        self._copy_stream.ring.give_back(copy.region)

    def _give_up(self) -> None:
        """Return regions after an error, once no thread and no kernel uses them."""
        if self._opening or self._in_flight:
            wait([opening for _, opening in self._opening])
            self._copy_stream.side_stream.drain()
        for copy in (*self._in_flight, *(copy for copy, _ in self._opening)):
            self._copy_stream.ring.give_back(copy.region)


def _all_blocks(x: Filling) -> list[int]:
    """Return the ids of all blocks of the blob, ``NOT_WANTED`` for those not to be filled."""
    rest = x.span.num_blocks - x.skip - len(x.block_ids)
    return [NOT_WANTED] * x.skip + x.block_ids + [NOT_WANTED] * rest
