"""The part of one key's limits that this gateway has at hand, and the scripts that hand it out.

The server's own clock counts, so no gateway's does. A clock of the server that jumps ahead fills a
bucket once, and one that jumps back fills it no more until it has caught up with a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from gateway.keys import Limits

Command: TypeAlias = tuple[bytes | str | int, ...]
Reply: TypeAlias = Any

MAX_GATEWAYS: Final = 1000  # with more entries than that the counts are not believed

NOW: Final = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""
# A bucket: takes out the number owed, then the number wanted, or as much of it as is there. If the
# number wanted is below 0, it is put back. ARGV: the bucket's capacity, owed, wanted.
_TAKE: Final = f"""{NOW}
local most, owed, wanted = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local seen = redis.call('HMGET', KEYS[1], 'level', 'at')
local level, at = tonumber(seen[1]) or most, tonumber(seen[2]) or now
if at - now > 60000 then at = now end
local passed = math.max(0, math.min(now - at, 60000))
level = math.min(most, level + passed * most / 60000)
level = math.max(level - owed, -most)
local given = math.max(0, math.min(wanted, level))
if wanted < 0 then given = math.max(wanted, level - most) end
level = level - given
redis.call('HSET', KEYS[1], 'level', tostring(level), 'at', math.max(now, at))
redis.call('PEXPIRE', KEYS[1], 180000)
return {{tostring(given), tostring(level)}}
"""
# Places: those that this gateway has from now on, and those that others have.
# ARGV: of all, gateway, used, wanted, lease in ms.
_PLACES: Final = f"""{NOW}
local most, used, wanted = tonumber(ARGV[1]), tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('HLEN', KEYS[1]) > {MAX_GATEWAYS} then return redis.error_reply('too many') end
local others, all, lease = 0, redis.call('HGETALL', KEYS[1]), tonumber(ARGV[5])
for i = 1, #all, 2 do
  if all[i] ~= ARGV[2] then
    local held, ends = string.match(all[i + 1], '^(%d+):(%d+)$')
    ends = tonumber(ends) or 0
    if ends < now or ends > now + 10 * lease then
      redis.call('HDEL', KEYS[1], all[i])
    else
      others = others + tonumber(held)
    end
  end
end
local given = math.max(used, math.min(wanted, most - others))
if given == 0 then
  redis.call('HDEL', KEYS[1], ARGV[2])
else
  redis.call('HSET', KEYS[1], ARGV[2], string.format('%d:%d', given, now + lease))
end
redis.call('PEXPIRE', KEYS[1], 10 * lease)
return {{given, others}}
"""
# One more session. ARGV: of all, its name, lease in ms.
_CLAIM: Final = f"""{NOW}
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[1], now + 10 * tonumber(ARGV[3]), '+inf')
local there = redis.call('ZSCORE', KEYS[1], ARGV[2])
if not there and redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[2])
redis.call('PEXPIRE', KEYS[1], 10 * tonumber(ARGV[3]))
return 1
"""
# Sessions that are there. ARGV: lease in ms, their names.
_KEEP: Final = f"""{NOW}
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], 10 * tonumber(ARGV[1]))
return 1
"""
SPACE: Final = "thermocline:limits:"
SLICE: Final = 40  # what is kept at hand is one part in so many of a minute's worth
SPARE: Final = 16  # and of the places
IDLE_S: Final = 3.0  # then what is at hand is given back
LEASE_S: Final = 10.0  # of places: who is gone for so long has none
RENEW_S: Final = LEASE_S / 4
KNOWN_S: Final = 0.5  # a bucket that is empty is not asked again for so long
TAKEN_S: Final = 1.0  # that others have all places is believed for so long: two rounds
Clock = Callable[[], float]


class Taken(NamedTuple):
    """The answer of a bucket: the number it gave, and its level now."""

    given: float
    level: float


def take(name: str, most: int, owed: float, wanted: float) -> Command:
    """Take from a bucket that fills with ``most`` in a minute, and holds as much."""
    return "EVAL", _TAKE, 1, SPACE + name, most, f"{owed:.6f}", f"{wanted:.6f}"


def read_taken(reply: Reply, most: int) -> Taken:
    """Read the answer to ``take``. Raises ``ValueError``: it is none that can be right."""
    try:
        given, level = (float(x) for x in reply)
    except (TypeError, ValueError) as error:
        raise ValueError(f"no answer of a bucket: {reply!r}") from error
    if not (-most <= given <= most and -most <= level <= most):
        raise ValueError("a bucket that holds what it cannot")
    return Taken(given, level)


def places(name: str, most: int, gateway: str, used: int, wanted: int, lease_ms: int) -> Command:
    """Have so many places, ``used`` of them in any case, for a time."""
    return "EVAL", _PLACES, 1, SPACE + name, most, gateway, used, wanted, lease_ms


def claim(name: str, most: int, session: str, lease_ms: int) -> Command:
    """Open a session, if there is room for one more or it is there."""
    return "EVAL", _CLAIM, 1, SPACE + name, most, session, lease_ms


def keep(name: str, sessions: list[str], lease_ms: int) -> Command:
    """Say that these sessions are still there."""
    return "EVAL", _KEEP, 1, SPACE + name, lease_ms, *sessions


def drop(name: str, sessions: list[str]) -> Command:
    """Say that these sessions are gone."""
    return "ZREM", SPACE + name, *sessions


def read_places(reply: Reply, most: int) -> int:
    """Read the answer to ``places``: how many requests may run here.

    Fewer than run already, where others have run more meanwhile. Raises ``ValueError``.
    """
    if not (isinstance(reply, list) and len(reply) == 2):
        raise ValueError(f"no answer to be used: {reply!r}")
    given, others = map(read_number, reply)
    return max(0, min(given, most - others))


def read_number(reply: Reply) -> int:
    """Read the answer to the others. Raises ``ValueError``."""
    if not isinstance(reply, int) or reply < 0:
        raise ValueError(f"no answer to be used: {reply!r}")
    return reply


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


class LocalQuota:
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
        self._others_have_all_at = float("-inf")  # when the server last said so
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

    @property
    def is_known_short(self) -> bool:
        """True if a moment ago there was not enough for one more request, as the server said."""
        others_had_all = self._clock() - self._others_have_all_at < TAKEN_S
        return not self.may_wait or (others_had_all and not self.has_place())

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
            yield question, partial(self._placed, wanted_places)

    def _placed(self, wanted: int, reply: Reply) -> None:
        self._held = read_places(reply, self.limits.concurrent_requests)
        self._renewed_at = self._clock()
        if self._held < wanted:
            self._others_have_all_at = self._renewed_at


def _taker(part: Slice, owed: float) -> Callable[[Reply], None]:
    return lambda reply: part.took(owed, read_taken(reply, part.most))
