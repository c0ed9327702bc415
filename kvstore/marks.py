"""The last bytes of a blob's name in a tier: which codec it is in.

The store speaks of *keys*: a key says what a blob holds (whose tokens, of which model), and nothing
of how it is packed. In a tier the blob lies under its key and the mark of its codec, so engines
with different codecs share a disk or a server without ever meeting each other's blobs, and a blob
in a codec used before is found by looking under one more mark. Session records have no mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kvstore.chain import RECORD
from kvstore.format import codec_in
from kvstore.tiers.base import Blob

MARK_BYTES: Final = 8
NO_MARK: Final = b""
_PERSON: Final = b"thermoclinecodec"


def mark_of(codec_id: str) -> bytes:
    return blake2b(codec_id.encode(), digest_size=MARK_BYTES, person=_PERSON).digest()


def marked(key: bytes, mark: bytes) -> bytes:
    """What a tier calls the blob."""
    return key if key[:1] == RECORD else key + mark


@dataclass(frozen=True)
class Marks:
    """Of one tier. ``home``: of the codec that its new blobs are in; others may rest there too."""

    home: bytes = NO_MARK
    others: tuple[bytes, ...] = ()
    # By the codec's name in the header of a blob. Rows that are kept as they are have no codec of
    # their own and lie under ``home``.
    by_codec: Mapping[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def among(cls, home: str, known: Sequence[str]) -> Marks:
        """``home`` and ``known`` are codec ids; blobs in each of them are looked for."""
        by_codec = {x.encode(): mark_of(x) for x in (home, *known)}
        first = mark_of(home)
        return cls(first, tuple(x for x in by_codec.values() if x != first), by_codec)

    def one(self, key: bytes) -> bytes:
        """Where a blob of this tier's own codec is."""
        return marked(key, self.home)

    def all(self, keys: Iterable[bytes]) -> list[bytes]:
        """Everywhere a blob may be, key by key."""
        if not self.others:
            return [self.one(key) for key in keys]
        every = (self.home, *self.others)
        return [
            name
            for key in keys
            for name in ((key,) if key[:1] == RECORD else (key + mark for mark in every))
        ]

    def new(self, key: bytes, blob: Blob) -> bytes:
        """Where this blob is to be put."""
        if not self.others:
            return self.one(key)
        return marked(key, self.by_codec.get(codec_in(blob), self.home))
