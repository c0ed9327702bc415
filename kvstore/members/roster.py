"""The slots on a Redis server in which engines announce themselves, each for a limited time.

There are ``NUM_SLOTS`` keys, in one slot of a cluster, and each is read up to a bound: a client
that can write there can hide engines from each other or fill all slots, but nothing more. If there
are more engines than slots, those without one still read the others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from kvstore.errors import TierUnavailable
from kvstore.members.entry import MAX_BYTES, Entry, EntrySeal
from kvstore.members.facts import Facts
from kvstore.tiers.redis_server.link import RedisLink
from kvstore.tiers.redis_server.servers import Command, Reply

NUM_SLOTS: Final = 128
LEASE_S: Final = 45.0
SLOTS: Final = tuple(b"thermocline:{members}:%03d" % i for i in range(NUM_SLOTS))

_TRIES: Final = 3  # to take a slot, in one round


class Roster:
    """The slots of one server. For one thread; every method may raise ``TierUnavailable``."""

    def __init__(self, link: RedisLink, seal: EntrySeal) -> None:
        self._link = link
        self._seal = seal
        self._own = b""  # our slot; b"" = none
        self._free: list[bytes] = list(SLOTS)
        self._now_ms = 0

    def look(self) -> list[Entry]:
        """Read all entries that are valid now."""
        commands: list[Command] = [("TIME",)]
        commands += [("GETRANGE", x, 0, MAX_BYTES) for x in SLOTS]
        now, *raws = self._run(commands)
        self._now_ms = _milliseconds(now)
        self._free = [x for x, raw in zip(SLOTS, raws, strict=True) if not raw]
        found = (
            self._seal.read(slot, raw)
            for slot, raw in zip(SLOTS, raws, strict=True)
            if isinstance(raw, bytes)
        )
        return [x for x in found if x is not None and self._is_good(x)]

    def _is_good(self, entry: Entry) -> bool:
        """False for an entry that was put back later; without a time that cannot be detected."""
        return not entry.at_ms or abs(self._now_ms - entry.at_ms) <= LEASE_S * 1000

    def keep(self, id: bytes, facts: Facts) -> bool:
        """Write our entry for one lease, after a ``look``; False: no slot is free."""
        lease_ms = round(LEASE_S * 1000)
        if self._own and self._is_ours(id):
            raw = self._seal.write(self._own, id, facts, self._now_ms)
            (reply,) = self._run([("SET", self._own, raw, "XX", "PX", lease_ms)])
            if reply is not None:
                return True
        self._own = b""
        for slot in random.sample(self._free, min(_TRIES, len(self._free))):
            raw = self._seal.write(slot, id, facts, self._now_ms)
            (reply,) = self._run([("SET", slot, raw, "NX", "PX", lease_ms)])
            if reply is not None:
                self._own = slot
                return True
        return False

    def leave(self, id: bytes) -> None:
        """Remove our entry, if it exists."""
        if self._own and self._is_ours(id):
            self._run([("UNLINK", self._own)])
        self._own = b""

    def _is_ours(self, id: bytes) -> bool:
        (raw,) = self._run([("GETRANGE", self._own, 0, MAX_BYTES)])
        entry = self._seal.read(self._own, raw)
        return entry is not None and entry.id == id

    def _run(self, commands: Sequence[Command]) -> list[Reply]:
        """Run commands. Any refusal makes the server unavailable, except for a foreign type."""
        replies = self._link.run(commands)
        for i, reply in enumerate(replies):
            if isinstance(reply, Exception):
                if str(reply).startswith("WRONGTYPE"):  # of another program: the slot is taken
                    replies[i] = b"?"
                    continue
                self._link.count(str(reply))
                raise TierUnavailable(f"redis: {reply}")
        return replies


def _milliseconds(reply: Reply) -> int:
    seconds, micros = reply
    return int(seconds) * 1000 + int(micros) // 1000
