"""The codecs of a store, one for each tier and others that it can read, and their tags in names.

Memory is read in a hurry and disk is read seldom, so each tier may have a codec of its own. The
header of a blob names its codec; the blob is read with that codec, whichever tier it is in.

The store works with *keys*: a key identifies the contents of a blob (whose tokens, of which model),
but not how they are packed. In a tier the blob is stored under its key and the tag of its codec. So
engines with different codecs share a disk or a server without ever meeting each other's blobs, and
a blob in a codec used before is found by looking under one more tag. Session records have no tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, TypeAlias

from kvstore.blobs.chain import RECORD
from kvstore.blobs.format import codec_in
from kvstore.blobs.segments import Segment, ThinRows, WholeRows
from kvstore.blobs.state_packer import StatePacker
from kvstore.codecs.base import Codec
from kvstore.codecs.session_codec import SessionCodec
from kvstore.errors import ForeignCodec
from kvstore.session import TierName
from kvstore.shapes import KVLayout, KVRun
from kvstore.tiers.base import Blob

Rows: TypeAlias = WholeRows | ThinRows
TAG_BYTES: Final = 8
NO_TAG: Final = b""
_PERSON: Final = b"thermoclinecodec"


@dataclass(frozen=True)
class CodecSet:
    """The codec of each tier. Two codecs with one id are the same codec."""

    ram: Codec
    disk: Codec
    redis: Codec
    # Can be read, but are not written. The codecs above are readable anyway.
    readable: tuple[Codec, ...] = ()
    # For a model with states: how states are packed beside rows, by the id of the rows' codec.
    # Beside rows in any other codec, states are exact.
    sessions: Mapping[str, SessionCodec] = field(default_factory=dict)

    @classmethod
    def one(cls, codec: Codec, readable: tuple[Codec, ...] = ()) -> CodecSet:
        """Use the same codec for every tier."""
        return cls(codec, codec, codec, readable)

    def of(self, tier: TierName) -> Codec:
        return {"ram": self.ram, "disk": self.disk, "redis": self.redis}[tier]

    def on(self, tiers: Iterable[TierName]) -> tuple[Codec, ...]:
        """List the codecs of these tiers without repetition, in this order."""
        return distinct(map(self.of, tiers))

    @property
    def written(self) -> tuple[Codec, ...]:
        """The codecs that blobs are written in, without repetition, the memory tier's first."""
        return distinct((self.ram, self.disk, self.redis))

    @property
    def known(self) -> tuple[Codec, ...]:
        """All codecs that may be read, those that are written first."""
        return distinct((*self.written, *self.readable))


def distinct(codecs: Iterable[Codec]) -> tuple[Codec, ...]:
    """Keep the first codec of each id."""
    found: dict[str, Codec] = {}
    for codec in codecs:
        found.setdefault(codec.id, codec)
    return tuple(found.values())


def as_set(codecs: Codec | CodecSet) -> CodecSet:
    return codecs if isinstance(codecs, CodecSet) else CodecSet.one(codecs)


@dataclass(frozen=True)
class KnownCodecs:
    """Unpacks segments in any of these codecs; replaced as a whole when others are adopted.

    ``rows``: the formats of rows stored without a codec. ``sessions``: all codecs of states that
    may be read, each by its id.
    """

    layout: KVLayout
    rows: Mapping[bytes, Rows]
    codecs: CodecSet
    by_name: Mapping[bytes, Codec]
    sessions: Mapping[str, SessionCodec]
    states: StatePacker

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(x.id for x in self.by_name.values())

    def find(self, codec_id: str) -> Codec | Rows:
        """Return the codec of a segment. Raises ``ForeignCodec`` if only another engine has it."""
        name = codec_id.encode()
        found = self.rows.get(name) or self.by_name.get(name)
        if found is None:
            raise ForeignCodec(f"the blob is in codec {codec_id!r}, which is not known here")
        return found

    def unpack(self, segment: Segment, out: KVRun) -> None:
        """Unpack all rows of a segment. Raises ``Unusable``."""
        found = self.find(segment.codec_id)
        if isinstance(found, Rows):
            found.decode(segment.payload, segment.num_tokens, out)
        else:
            found.decode(segment.payload, self.layout, segment.first, out)

    def least_nbytes(self, segment: Segment) -> int:
        """Return the fewest bytes that its tokens may take. Raises ``ForeignCodec``."""
        found = self.find(segment.codec_id)
        if isinstance(found, Rows):
            return found.least_nbytes(segment.num_tokens)
        return found.least_nbytes(self.layout, segment.num_tokens, segment.first)


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
            tag = self.home
            return [key if key[:1] == RECORD else key + tag for key in keys]
        every = (self.home, *self.others)
        return [
            name
            for key in keys
            for name in ((key,) if key[:1] == RECORD else (key + tag for tag in every))
        ]

    def named(self, items: Sequence[tuple[bytes, Blob]]) -> list[tuple[bytes, Blob]]:
        """Replace the keys of blobs by the names to store them under."""
        if not self.others:
            names = self.all([key for key, _ in items])
            return [(name, blob) for name, (_, blob) in zip(names, items, strict=True)]
        return [(self.new(key, blob), blob) for key, blob in items]

    def new(self, key: bytes, blob: Blob) -> bytes:
        """The name to store this blob under."""
        if not self.others:
            return self.one(key)
        return tagged(key, self.by_codec.get(codec_in(blob), self.home))
