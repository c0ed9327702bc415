"""One tenant's bytes of one tier, divided among the engines: in this process, or by a Redis.

Each engine has a share, which its tier enforces. All shares together are never more than the
tenant's limit, unless engines hold more already. A share grows by the bytes that are free then.
An engine that wants more than is free makes the others *short*: those with more than an equal part
then give way, and their tiers evict the tenant's least recent blobs there.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final, NamedTuple

from gateway.edge.stock import MAX_GATEWAYS, NOW, SPACE, Command, Reply

MAX_NUMBER: Final = 1 << 52  # that Lua computes exactly


class Share(NamedTuple):
    """The answer to one engine: its share, and the state of the others."""

    given: int
    others: int = 0  # the shares of all others together
    num_others: int = 0
    short: int = 0  # that others want within an equal part, and do not have

    def kept(self, most: int) -> int:
        """Return what of the share to keep where others are short, or all have too much."""
        equal = most // (self.num_others + 1)
        missing = max(self.short, self.given + self.others - most)
        return min(self.given, max(equal, self.given - missing))


class Entry(NamedTuple):
    """One engine's share, and the bytes that it wanted when it got it."""

    given: int
    wanted: int


def divide(most: int, others: Mapping[str, Entry], used: int, wanted: int) -> Share:
    """Give an engine ``used`` bytes in any case, and as much of ``wanted`` as the others leave.

    What others are short of is theirs first, unless the engine has less than an equal part.
    """
    taken = sum(x.given for x in others.values())
    equal = most // (len(others) + 1)
    short = sum(max(0, min(x.wanted, equal) - x.given) for x in others.values())
    given = max(used, min(wanted, most - taken, max(equal, most - taken - short)))
    return Share(given, taken, len(others), short)


class LocalShares:
    """The shares of the engines of this gateway, of one tenant and tier."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def ask(self, most: int, engine: str, used: int, wanted: int) -> Share:
        """See ``divide``. An engine that uses and wants nothing has no share."""
        others = {name: x for name, x in self._entries.items() if name != engine}
        share = divide(most, others, used, wanted)
        self._entries = others
        if used or wanted:
            self._entries[engine] = Entry(share.given, wanted)
        return share

    def keep(self, engines: Container[str]) -> None:
        """Forget the shares of engines that are not there any more."""
        self._entries = {name: x for name, x in self._entries.items() if name in engines}


# ``divide`` on the server, among all gateways' engines. ARGV: of all, engine, used, wanted, lease
# in ms, held. An entry is given:wanted:end:held.
_SHARE: Final = f"""{NOW}
local most, used, wanted = tonumber(ARGV[1]), tonumber(ARGV[3]), tonumber(ARGV[4])
local lease = tonumber(ARGV[5])
if redis.call('HLEN', KEYS[1]) > {MAX_GATEWAYS} then return redis.error_reply('too many') end
local taken, num, all, there = 0, 0, redis.call('HGETALL', KEYS[1]), {{}}
for i = 1, #all, 2 do
  if all[i] ~= ARGV[2] then
    local g, w, e = string.match(all[i + 1], '^(%d+):(%d+):(%d+):%d+$')
    e = tonumber(e) or 0
    if e < now or e > now + 10 * lease then
      redis.call('HDEL', KEYS[1], all[i])
    else
      taken, num = taken + tonumber(g), num + 1
      there[num] = {{tonumber(g), tonumber(w)}}
    end
  end
end
local equal, short = math.floor(most / (num + 1)), 0
for i = 1, num do short = short + math.max(0, math.min(there[i][2], equal) - there[i][1]) end
local free = most - taken
local given = math.max(used, math.min(wanted, free, math.max(equal, free - short)))
if used == 0 and wanted == 0 then
  redis.call('HDEL', KEYS[1], ARGV[2])
else
  local entry = string.format('%.0f:%.0f:%.0f', math.max(0, given), wanted, now + lease)
  redis.call('HSET', KEYS[1], ARGV[2], entry .. ':' .. ARGV[6])
end
redis.call('PEXPIRE', KEYS[1], 10 * lease)
return {{given, taken, num, short}}
"""
# The bytes that all engines hold together, as their gateways said last.
_HELD: Final = f"""{NOW}
if redis.call('HLEN', KEYS[1]) > {MAX_GATEWAYS} then return redis.error_reply('too many') end
local sum, all = 0, redis.call('HGETALL', KEYS[1])
for i = 2, #all, 2 do
  local e, held = string.match(all[i], '^%d+:%d+:(%d+):(%d+)$')
  if e and tonumber(e) >= now then sum = sum + tonumber(held) end
end
return sum
"""
# Be the one gateway that sets the limits of an engine that several use. ARGV: gateway, lease in ms.
_LEAD: Final = """
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


def ask_share(
    name: str, most: int, engine: str, used: int, wanted: int, lease_ms: int, held: int = 0
) -> Command:
    """Ask as ``LocalShares.ask`` does. ``held``: what the engine holds, for ``ask_held``."""
    return "EVAL", _SHARE, 1, SPACE + name, most, engine, used, wanted, lease_ms, held


def ask_held(name: str) -> Command:
    """Ask how many bytes all engines hold together."""
    return "EVAL", _HELD, 1, SPACE + name


def lead(name: str, gateway: str, lease_ms: int) -> Command:
    """Ask to be the gateway that sets an engine's limits."""
    return "EVAL", _LEAD, 1, SPACE + name, gateway, lease_ms


def read_share(reply: Reply) -> Share:
    """Read the answer to ``ask_share``. Raises ``ValueError``: it is none that can be right."""
    if not (isinstance(reply, list) and len(reply) == 4):
        raise ValueError(f"no answer to be used: {reply!r}")
    return Share(*map(read_bytes, reply))


def read_bytes(reply: Reply) -> int:
    """Read a number of bytes. Raises ``ValueError``: it is none that can be right."""
    if not (isinstance(reply, int) and 0 <= reply < MAX_NUMBER):
        raise ValueError(f"an answer that is no number of bytes: {reply!r}")
    return reply
