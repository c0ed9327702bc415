"""One save on the device: blocks pass through the ring, a few blobs at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from torch import Tensor

from engines.vllm_plugin.blocks.blocks import Packing
from engines.vllm_plugin.device.copy_stream import Batch, CopyStream, InFlight
from engines.vllm_plugin.device.staging import Region
from kvstore.store.records import Span
from kvstore.tiers.base import Blob


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
                seal = partial(self._seal, copy, x.span, staged, rows)
                self._sealing.append(self._copy_stream.store.workers.codec(seal))
                rest -= 1
        finally:  # nothing is left unless the threads take no more work
            self._give_back(copy, rest)

    def _seal(
        self, copy: InFlight[Packing], span: Span, staged: np.ndarray, rescued: bytes
    ) -> Blob:
        try:
            return copy.batch.layout.seal(span, staged, rescued)
        finally:
            self._copy_stream.ring.give_back(copy.region)

    def _give_up(self) -> None:
        """Wait for the device after an error, and return the regions.

        vLLM may reuse the blocks at once.
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
