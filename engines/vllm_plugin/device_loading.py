"""One load on the device: blobs, piece after piece through the ring, into the blocks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Final

from torch import Tensor

from engines.vllm_plugin.device_forms import Form, KeptRows
from engines.vllm_plugin.device_lane import Flight, Lane
from engines.vllm_plugin.device_staging import Region
from engines.vllm_plugin.transfer import Filling
from kvstore.errors import Unusable
from kvstore.tiers.base import Blob

logger = logging.getLogger("thermocline.vllm")

OPENED_AHEAD: Final = 4
NOT_WANTED: Final = -1  # a block that kernels leave alone


class Loading:
    """While the device fills the blocks of one piece, threads of the codec check the next ones."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._opening: deque[tuple[Flight, Future[list[KeptRows] | None]]] = deque()
        self._flying: deque[Flight] = deque()
        self._filled: set[int] = set()

    def run(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        """As ``transfer.Blocks.fill``."""
        try:
            with self._lane.stream.behind(ready):
                self._write_all(wanted)
        finally:
            self._give_up()
        return self._filled

    def _write_all(self, wanted: Sequence[Filling]) -> None:
        blocks = self._lane.table([i for x in wanted for i in _whole_piece(x)])
        first = 0
        for x in wanted:
            form = self._lane.form_of(x.piece)
            flight = Flight(form, self._room(form, blocks), x.piece, first, x.block_ids)
            opening = self._lane.store.workers.codec(self._opened, flight, x.blob)
            self._opening.append((flight, opening))
            if len(self._opening) > OPENED_AHEAD:
                self._write(blocks)
            first += x.piece.num_blocks * self._lane.store.keys.block_tokens
        while self._opening:
            self._write(blocks)
        while self._flying:
            self._land()

    def _room(self, form: Form, blocks: Tensor) -> Region:
        """Waits for others only with empty hands, so that two never wait for each other."""
        while True:
            holding = bool(self._opening or self._flying)
            region = self._lane.ring.take(form.nbytes, wait=not holding)
            if region is not None:
                return region
            if self._flying:
                self._land()
            else:
                self._write(blocks)

    def _opened(self, flight: Flight, blob: Blob) -> list[KeptRows] | None:
        """None if the blob is of no use; then it must not be offered again."""
        piece = flight.piece
        try:
            first = self._lane.first_token(piece)
            return flight.form.open(blob, piece, first, flight.region.array)
        except Unusable as error:
            logger.warning("a verified blob cannot be decoded: %s", error)
            self._lane.store.discard(piece.key)
            return None

    def _write(self, blocks: Tensor) -> None:
        flight, opening = self._opening[0]
        kept = opening.result()
        self._opening.popleft()
        self._flying.append(flight)
        if kept is not None:
            flight.region.upload()
            with self._lane.launching:
                flight.form.write(blocks, flight.first, flight.region.device, kept)
            self._filled.update(flight.block_ids)
        flight.landed = self._lane.stream.done()

    def _land(self) -> None:
        flight = self._flying[0]
        assert flight.landed is not None
        flight.landed()
        self._flying.popleft()
        self._lane.ring.give_back(flight.region)

    def _give_up(self) -> None:
        """After an error: no thread and no kernel may use a region that is given back."""
        if self._opening or self._flying:
            wait([opening for _, opening in self._opening])
            self._lane.stream.drain()
        for flight in (*self._flying, *(flight for flight, _ in self._opening)):
            self._lane.ring.give_back(flight.region)


def _whole_piece(x: Filling) -> list[int]:
    """Ids of all blocks of the piece, those that nobody asked for marked so."""
    behind = x.piece.num_blocks - x.skip - len(x.block_ids)
    return [NOT_WANTED] * x.skip + x.block_ids + [NOT_WANTED] * behind
