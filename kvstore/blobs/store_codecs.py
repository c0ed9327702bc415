"""The codec that a store writes, and all that it can read.

A chunk is packed once, when its turn ends, and the same bytes rest in every tier. When another
codec is adopted the *writer* changes: the header of each blob names its codec, and a blob is read
with that one for as long as it is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from kvstore.codecs.base import Codec, RawCodec
from kvstore.codecs.profile import Profile
from kvstore.codecs.session_codec import SessionCodec

RAW: Final = RawCodec()
C = TypeVar("C", Codec, SessionCodec)


@dataclass(frozen=True)
class StoreCodecs:
    """Two codecs with one id are the same codec.

    Args:
        rows: packs the rows of layers that keep all tokens.
        session: how the windows and matrices of a model with states are packed beside them; None =
            exactly.
        readable: codecs that are not written and can be read; the others are readable anyway.
        readable_sessions: likewise, of windows and matrices.
        profile: all that the written codecs learned from the model, for servers that lack it.
    """

    rows: Codec
    session: SessionCodec | None = None
    readable: tuple[Codec, ...] = ()
    readable_sessions: tuple[SessionCodec, ...] = ()
    profile: Profile | None = field(default=None, compare=False, repr=False)

    @property
    def windows(self) -> Codec:
        """The codec of windows' rows."""
        return (self.session.windows if self.session else None) or RAW

    @property
    def packs_matrices(self) -> bool:
        return self.session is not None and not self.session.matrices.exact

    @property
    def exact(self) -> bool:
        """True if whole sessions are restored bit for bit."""
        return self.rows.exact and (self.session is None or self.session.exact)

    def with_readable(self, other: StoreCodecs) -> StoreCodecs:
        """Return the same writer with all that ``other`` writes or reads readable as well."""
        return replace(
            self,
            readable=distinct((*self.readable, other.rows, *other.readable)),
            readable_sessions=distinct((*self.sessions, *other.sessions)),
        )

    @property
    def written_ids(self) -> list[str]:
        """Ids of the lossy codecs that pack now, as headers of blobs and states name them."""
        parts = (self.rows, self.windows, *((self.session.matrices,) if self.session else ()))
        return [x.id for x in parts if not x.exact]

    @property
    def known(self) -> tuple[Codec, ...]:
        """All codecs of rows that may be read, the written one first."""
        return distinct((self.rows, *self.readable))

    @property
    def sessions(self) -> tuple[SessionCodec, ...]:
        """All codecs of windows and matrices that may be read, the written one first."""
        own = () if self.session is None else (self.session,)
        return distinct((*own, *self.readable_sessions))


def distinct(codecs: Iterable[C]) -> tuple[C, ...]:
    """Keep the first codec of each id."""
    found: dict[str, C] = {}
    for codec in codecs:
        found.setdefault(codec.id, codec)
    return tuple(found.values())


def as_codecs(codecs: Codec | StoreCodecs) -> StoreCodecs:
    return codecs if isinstance(codecs, StoreCodecs) else StoreCodecs(codecs)
