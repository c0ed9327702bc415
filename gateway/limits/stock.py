"""The part of one key's limits that this gateway has at hand, taken from the common limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from gateway.keys import Limits
from gateway.limits.limit_scripts import (
    Command,
    Reply,
    Taken,
    places,
    read_places,
    read_taken,
    take,
)

SLICE: Final = 40  # what is kept at hand is one part in so many of a minute's worth
SPARE: Final = 16  # and of the places
IDLE_S: Final = 3.0  # then what is at hand is given back
LEASE_S: Final = 10.0  # of places: who is gone for so long has none
RENEW_S: Final = LEASE_S / 4
KNOWN_S: Final = 0.5  # a bucket that is empty is not asked again for so long

Clock = Callable[[], float]


class Slice:
    """A part of one bucket. ``level`` is less than nothing where more was used than there was."""

    def __init__(self, most: int, clock: Clock) -> None:
        self.most = most
        self.level = 0.0
        self._clock = clock
        self._used_at = clock()
        self._left = Taken(0.0, 0.0)
        self._left_at = float("-inf")

    def use(self, number: float) -> None:
        self._used_at = self._clock()
        self.level -= number

    @property
    def remaining(self) -> int:
        """Return what all gateways together may use now, as far as is known."""
        return max(0, int(self.level + self._left.level))

    def holds(self, number: float) -> bool:
        return self.level >= number

    @property
    def is_known_empty(self) -> bool:
        """True if the bucket had less than a unit a moment ago."""
        return self._left.level < 1.0 and self._clock() - self._left_at < KNOWN_S

    def wait_s(self, number: float) -> float:
        """Return the seconds until the bucket may hold so much."""
        missing = number - max(0.0, self.level) - self._left.level
        return min(60.0, max(1.0, missing * 60.0 / self.most))

    def wanted(self, num_waiting: int) -> tuple[float, float]:
        """Return the number owed, and the number wanted beyond the level: below 0 to give back."""
        idle = self._clock() - self._used_at > IDLE_S and not num_waiting
        aim = 0.0 if idle else num_waiting + self.most / SLICE
        return max(0.0, -self.level), aim - max(0.0, self.level)

    def is_due(self, num_waiting: int) -> bool:
        owed, wanted = self.wanted(num_waiting)
        return owed > 0 or wanted < 0 or wanted > self.most / SLICE / 2

    def took(self, owed: float, taken: Taken) -> None:
        self.level += owed + taken.given
        self._left, self._left_at = taken, self._clock()


class Stock:
    """Holds what one key may take here at once. Runs on the event loop."""

    def __init__(self, name: str, limits: Limits, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self.running = 0  # requests that have a place, kept by ``KeyLimits``
        self.num_waiting = 0  # requests that wait for a round
        self.reserved = 0  # requests that have waited, and have not taken what they waited for
        self.used_at = clock()
        self._held = 0  # places that may be used here
        self._renewed_at = float("-inf")
        self.limit_to(limits)

    def limit_to(self, limits: Limits) -> None:
        """Count by these limits from now on."""
        self.limits = limits
        both = ("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute)
        self.slices = {what: Slice(most, self._clock) for what, most in both if most}

    def reset(self) -> None:
        """Forget the slices and places at hand: how much of them is left is not known any more."""
        self._held, self._renewed_at = 0, float("-inf")
        for each in self.slices.values():
            each.level = min(each.level, 0.0)

    @property
    def is_enough(self) -> bool:
        """True if the slices and places at hand suffice for one more request."""
        more = self.reserved + 1
        if not all(x.holds(more) for x in self.slices.values()):
            return False
        return not self.limits.concurrent_requests or self._held >= self.running + more

    @property
    def may_wait(self) -> bool:
        """False if it is known already that nothing more is to be had."""
        return not any(x.is_known_empty and not x.holds(1) for x in self.slices.values())

    def has_place(self) -> bool:
        return not self.limits.concurrent_requests or self._held > self.running

    @property
    def is_idle(self) -> bool:
        """True if nothing is at hand or owed, and nothing runs or waits."""
        rests = all(not x.level for x in self.slices.values())
        return rests and not (self._held or self.running or self.num_waiting or self.reserved)

    def questions(
        self, gateway: str, now: float
    ) -> Iterator[tuple[Command, Callable[[Reply], None]]]:
        """Yield each command to send now, with the function for its answer (or ``ValueError``)."""
        for what, part in self.slices.items():
            if part.is_due(self.num_waiting + self.reserved):
                owed, wanted = part.wanted(self.num_waiting + self.reserved)
                command = take(f"{self.name}:{what}", part.most, owed, wanted)
                yield command, _taker(part, owed)
        most = self.limits.concurrent_requests
        if not most:
            return
        used = self.running
        wanted_places = min(most, used + self.num_waiting + self.reserved + most // SPARE)
        if not used and not self.num_waiting and not self.reserved:
            wanted_places = 0
        is_due = now - self._renewed_at > RENEW_S and (self._held or used)
        if wanted_places != self._held or used > self._held or is_due:
            lease_ms = round(LEASE_S * 1000)
            question = places(f"{self.name}:places", most, gateway, used, wanted_places, lease_ms)
            yield question, self._placed

    def _placed(self, reply: Reply) -> None:
        self._held = read_places(reply, self.limits.concurrent_requests)
        self._renewed_at = self._clock()


def _taker(part: Slice, owed: float) -> Callable[[Reply], None]:
    return lambda reply: part.took(owed, read_taken(reply, part.most))
