"""The Redis scripts by which gateways keep a key's limits together; each works on one key.

The server's own clock counts, so no gateway's does. A clock of the server that jumps ahead fills a
bucket once, and one that jumps back fills it no more until it has caught up with a minute.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

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
