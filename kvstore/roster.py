"""The engines that announce themselves on a Redis server, and the facts in their entries.

    4 bytes     magic
    8 bytes     the engine's id, drawn at its start
    4 bytes     name of the key that seals the rest; zeros: the engine has no secret
    the rest    facts and the server's time of writing, encrypted with AES-256-GCM

Two engines learn only from the key's name whether they share a secret: it is derived from the
secret without revealing it. The entry's slot is bound in, and so is the time: an entry that is
moved, or put back later, is invalid.

There are ``NUM_SLOTS`` keys, in one slot of a cluster, and each is read up to a bound: a client
that can write there can hide engines from each other or fill all slots, but nothing more. If there
are more engines than slots, those without one still read the others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import Corrupt, TierUnavailable
from kvstore.tiers.seal import KEY_NAME_BYTES, Seal

if TYPE_CHECKING:
    from kvstore.tiers.redis_server.link import Command, RedisLink, Reply

PLACE: Final = "members"
MAX_BYTES: Final = 4096  # a longer entry is not read to its end, and is invalid
ID_BYTES: Final = 8
_MAGIC: Final = b"TCE1"
_HEAD_BYTES: Final = len(_MAGIC) + ID_BYTES + KEY_NAME_BYTES
_NO_KEY: Final = bytes(KEY_NAME_BYTES)
_MAX_TEXT: Final = 200  # of a model's name; the rest is short by nature
NUM_SLOTS: Final = 128
LEASE_S: Final = 45.0
SLOTS: Final = tuple(b"thermocline:{members}:%03d" % i for i in range(NUM_SLOTS))
_TRIES: Final = 3  # to take a slot, in one round


def release() -> str:
    """Return the version of this program; "" if it is not installed as a package."""
    try:
        return version("thermocline")
    except PackageNotFoundError:
        return ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Names the facts in which two engines must agree to find each other's blobs.

    Later releases may add fields; fields that are unknown here are ignored.
    """

    model: str  # as clients call it
    part: str = ""  # of the model, if several processes have one part each
    fingerprint: str
    codec: str = ""  # id of the codec that is used for Redis
    chunk_tokens: int = 0
    encrypt: bool = False
    hash_seed: str = ""  # PYTHONHASHSEED, which affects the engine's own names of blocks
    release: str = msgspec.field(default_factory=release)


class Entry(msgspec.Struct, frozen=True):
    """An entry that was read."""

    id: bytes
    facts: Facts | None = None  # None: sealed with another secret, or not sealed
    at_ms: int = 0  # the server's time when it was written
    forged: bool = False  # it names our key, but is not sealed with it


class _Said(msgspec.Struct, frozen=True, array_like=True):
    at_ms: int
    facts: Facts


class EntrySeal:
    """Writes and reads entries. Thread-safe.

    Args:
        secret: the server's; b"" = it has none, and its entry shows only that it exists.
    """

    def __init__(self, secret: bytes) -> None:
        self._seal = Seal(secret, PLACE, encrypt=True) if secret else None
        self._key_name = self._seal.key_name if self._seal else _NO_KEY

    def write(self, slot: bytes, id: bytes, facts: Facts, at_ms: int) -> bytes:
        """Make the bytes of an entry that is valid in this slot, at this time."""
        head = _MAGIC + id + self._key_name
        if self._seal is None:
            return head
        short = msgspec.structs.replace(facts, model=facts.model[:_MAX_TEXT])
        return head + self._seal.close(slot + id, msgspec.msgpack.encode(_Said(at_ms, short)))

    def read(self, slot: bytes, raw: bytes) -> Entry | None:
        """Read the entry in a slot; None: it is not an entry."""
        if not _HEAD_BYTES <= len(raw) <= MAX_BYTES or not raw.startswith(_MAGIC):
            return None
        id = raw[len(_MAGIC) : len(_MAGIC) + ID_BYTES]
        if raw[_HEAD_BYTES - KEY_NAME_BYTES : _HEAD_BYTES] != self._key_name:
            return Entry(id)
        if self._seal is None:
            return Entry(id, Facts(model="", fingerprint="", release=""))
        try:
            opened = self._seal.open(slot + id, raw[_HEAD_BYTES:])
            said = msgspec.msgpack.decode(opened, type=_Said)
        except (Corrupt, msgspec.DecodeError):
            return Entry(id, forged=True)
        return Entry(id, said.facts, said.at_ms)


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
