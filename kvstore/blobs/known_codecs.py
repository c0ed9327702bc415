"""The codecs that can be read at one moment, by the names that blobs and segments use for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.segments import Segment
from kvstore.blobs.state_packer import StatePacker
from kvstore.blobs.whole_rows import ThinRows, WholeRows
from kvstore.codecs.base import Codec
from kvstore.codecs.session_codec import SessionCodec
from kvstore.errors import ForeignCodec
from kvstore.shapes import KVLayout, KVRun

Rows: TypeAlias = WholeRows | ThinRows


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
