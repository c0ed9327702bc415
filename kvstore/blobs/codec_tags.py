"""The last bytes of a blob's name in a tier: the codec of the blob.

The store works with *keys*: a key identifies the contents of a blob (whose tokens, of which model),
but not how they are packed. In a tier the blob is stored under its key and the tag of its codec. So
engines with different codecs share a disk or a server without ever meeting each other's blobs, and
a blob in a codec used before is found by looking under one more tag. Session records have no tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kvstore.blobs.chain import RECORD
from kvstore.blobs.format import codec_in
from kvstore.tiers.base import Blob

TAG_BYTES: Final = 8
NO_TAG: Final = b""
_PERSON: Final = b"thermoclinecodec"


def tag_of(codec_id: str) -> bytes:
    return blake2b(codec_id.encode(), digest_size=TAG_BYTES, person=_PERSON).digest()


def tagged(key: bytes, tag: bytes) -> bytes:
    """The name of the blob in a tier."""
    return key if key[:1] == RECORD else key + tag


@dataclass(frozen=True)
class CodecTags:
    """Tags of one tier.

    New blobs are in the codec of ``home``; blobs in the codecs of ``others`` may be stored too.
    """

    home: bytes = NO_TAG
    others: tuple[bytes, ...] = ()
    # By the codec's name in the header of a blob. Rows that are stored without a codec have no tag
    # of their own and are under ``home``.
    by_codec: Mapping[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def among(cls, home: str, known: Sequence[str]) -> CodecTags:
        """Make the tags of a tier from codec ids; blobs in ``home`` and ``known`` are found."""
        by_codec = {x.encode(): tag_of(x) for x in (home, *known)}
        first = tag_of(home)
        return cls(first, tuple(x for x in by_codec.values() if x != first), by_codec)

    def one(self, key: bytes) -> bytes:
        """The name of a blob in this tier's own codec."""
        return tagged(key, self.home)

    def all(self, keys: Iterable[bytes]) -> list[bytes]:
        """List every name that a blob may have, key by key."""
        if not self.others:
            return [self.one(key) for key in keys]
        every = (self.home, *self.others)
        return [
            name
            for key in keys
            for name in ((key,) if key[:1] == RECORD else (key + tag for tag in every))
        ]

    def new(self, key: bytes, blob: Blob) -> bytes:
        """The name to store this blob under."""
        if not self.others:
            return self.one(key)
        return tagged(key, self.by_codec.get(codec_in(blob), self.home))
