"""One save on the device: out of the blocks, piece after piece through the ring, into blobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from torch import Tensor

from engines.vllm_plugin.device_forms import Form
from engines.vllm_plugin.device_lane import Flight, Lane
from engines.vllm_plugin.device_staging import Region
from engines.vllm_plugin.transfer import Packing


class Saving:
    """While the device reads one piece, threads of the codec make blobs of those before it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._flying: deque[Flight] = deque()
        self._sealing: list[Future[bytes]] = []

    def run(self, wanted: Sequence[Packing], ready: object) -> list[Future[bytes]]:
        """As ``transfer.Blocks.pack``."""
        try:
            with self._lane.stream.behind(ready):
                self._read_all(wanted)
        finally:
            self._give_up()
        return self._sealing

    def _read_all(self, wanted: Sequence[Packing]) -> None:
        blocks = self._lane.table([i for x in wanted for i in x.block_ids])
        first = 0
        for x in wanted:
            form = self._lane.form_of(x.piece)
            flight = Flight(form, self._room(form), x.piece, first, x.block_ids)
            self._flying.append(flight)
            self._read(flight, blocks)
            first += len(x.block_ids) * self._lane.store.keys.block_tokens
        while self._flying:
            self._land()

    def _read(self, flight: Flight, blocks: Tensor) -> None:
        with self._lane.launching:
            # Straight into the host's memory: packed, it is a fifth of what a copy would move.
            flight.form.read(blocks, flight.first, flight.region.host)
        flight.landed = self._lane.stream.done()

    def _room(self, form: Form) -> Region:
        """Waits for others only with empty hands, so that two never wait for each other."""
        while (region := self._lane.ring.take(form.nbytes, wait=not self._flying)) is None:
            self._land()
        return region

    def _land(self) -> None:
        flight = self._flying[0]
        assert flight.landed is not None
        flight.landed()
        rescued = flight.form.rescue(flight.block_ids, flight.region.array)
        self._sealing.append(self._lane.store.workers.codec(self._sealed, flight, rescued))
        self._flying.popleft()

    def _sealed(self, flight: Flight, rescued: bytes) -> bytes:
        try:
            first = self._lane.first_token(flight.piece)
            return flight.form.seal(flight.piece, first, flight.region.array, rescued)
        finally:
            self._lane.ring.give_back(flight.region)

    def _give_up(self) -> None:
        """After an error: the blocks are vLLM's again at once, and the regions others'."""
        if self._flying:
            self._lane.stream.drain()
        for flight in self._flying:
            self._lane.ring.give_back(flight.region)
