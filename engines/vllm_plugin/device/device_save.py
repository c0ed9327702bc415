"""One save on the device: blocks pass through the ring, blob by blob."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from engines.vllm_plugin.blocks.blocks import Packing
from engines.vllm_plugin.device.copy_stream import CopyStream, InFlight
from engines.vllm_plugin.device.layouts.staging_layout import StagingLayout
from engines.vllm_plugin.device.staging import Region


class DeviceSave:
    """Makes blobs from blocks; codec threads seal those that the device has packed.

    Used once, by the thread that calls ``run``.
    """

    def __init__(self, copy_stream: CopyStream) -> None:
        self._copy_stream = copy_stream
        self._in_flight: deque[InFlight] = deque()
        self._sealing: list[Future[bytes]] = []

    def run(self, wanted: Sequence[Packing], ready: object) -> list[Future[bytes]]:
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
        first = 0
        for x in wanted:
            layout = self._copy_stream.layout_of(x.span)
            copy = InFlight(layout, self._take_region(layout), x.span, first, x.block_ids)
            self._in_flight.append(copy)
            self._read(copy, blocks)
            first += len(x.block_ids) * self._copy_stream.store.keys.block_tokens
        while self._in_flight:
            self._finish_oldest()

    def _read(self, copy: InFlight, blocks: Tensor) -> None:
        run = self._copy_stream.run_of(copy, blocks)
        read = partial(copy.layout.read, run, copy.region.device)
        self._copy_stream.side_stream.ask(read)
        self._copy_stream.side_stream.ask(copy.region.download)
        copy.wait_done = self._copy_stream.side_stream.completion()

    def _take_region(self, layout: StagingLayout) -> Region:
        """Take a region. Wait for other threads only while holding none: two could deadlock."""
        while (
            region := self._copy_stream.ring.take(layout.nbytes, wait=not self._in_flight)
        ) is None:
            self._finish_oldest()
        return region

    def _finish_oldest(self) -> None:
        copy = self._in_flight[0]
        assert copy.wait_done is not None
        copy.wait_done()
        rescued = copy.layout.rescue(copy.block_ids, copy.region.array)
        self._sealing.append(self._copy_stream.store.workers.codec(self._seal, copy, rescued))
        self._in_flight.popleft()

    def _seal(self, copy: InFlight, rescued: bytes) -> bytes:
        try:
            first = self._copy_stream.first_token(copy.span)
            return copy.layout.seal(copy.span, first, copy.region.array, rescued)
        finally:
            self._copy_stream.ring.give_back(copy.region)

    def _give_up(self) -> None:
        """Wait for the device after an error, and return the regions.

        vLLM may reuse the blocks at once.
        """
        if self._in_flight:
            self._copy_stream.side_stream.drain()
        for copy in self._in_flight:
            self._copy_stream.ring.give_back(copy.region)
