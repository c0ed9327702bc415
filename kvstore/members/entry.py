"""One engine's entry: its writer in clear, its contents sealed with the server's secret.

    4 bytes     magic
    8 bytes     the engine's id, drawn at its start
    4 bytes     name of the key that seals the rest; zeros: the engine has no secret
    the rest    facts and the server's time of writing, encrypted with AES-256-GCM

Two engines learn only from the key's name whether they share a secret: it is derived from the
secret without revealing it. The entry's slot is bound in, and so is the time: an entry that is
moved, or put back later, is invalid.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.errors import Corrupt
from kvstore.members.facts import Facts
from kvstore.tiers.seal import KEY_NAME_BYTES, Seal

PLACE: Final = "members"
MAX_BYTES: Final = 4096  # a longer entry is not read to its end, and is invalid
ID_BYTES: Final = 8

_MAGIC: Final = b"TCE1"
_HEAD_BYTES: Final = len(_MAGIC) + ID_BYTES + KEY_NAME_BYTES
_NO_KEY: Final = bytes(KEY_NAME_BYTES)
_MAX_TEXT: Final = 200  # of a model's name; the rest is short by nature


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
