"""The common part of all records of sessions, and the protocol through which a ledger uses them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final, Protocol, Self, TypeVar

import msgspec

from kvstore.tiers.base import Blob

MAX_CODECS: Final = 16  # that a session's record remembers
MAX_LEFT_BEHIND: Final = 1024  # chunks of abandoned branches that a record remembers


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a session's record that is the same for every kind of store.

    A record is stored in the tiers beside the session's blobs and is written after them, so that a
    reader that finds it also finds the blobs that it names.
    """

    tenant: str
    id: str
    codecs: tuple[str, ...] = ()  # ids that its blobs may be in, the newest first
    last_used_s: float  # wall clock, for display and ttl only
    pinned: bool = False
    packed_bytes: int = 0  # of all blobs of the session except this record, headers included
    # Of these, rows after the last full chunk. None: an older release left them unpacked.
    tail_bytes: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV is stored."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Memory that the record takes, in bytes."""
        raise NotImplementedError

    @property
    def comparable_tokens(self) -> int:
        """Number of its leading tokens that can be compared with a prompt."""
        return self.num_tokens

    @property
    def state_positions(self) -> Sequence[int]:
        """Numbers of tokens after which a state is stored."""
        return ()

    @property
    def states_bytes(self) -> int:
        """Bytes of all its states."""
        return 0

    @property
    def abandoned(self) -> Sequence[bytes]:
        """Keys of blobs that an edited history no longer uses and that may still be requested."""
        return ()

    def abandoning(self, keys: Sequence[bytes]) -> Self:
        """The record with other abandoned blobs."""
        raise NotImplementedError

    def resized(self, run_bytes: int, tail_bytes: int, states_bytes: int) -> Self:
        """The record with other sizes of its blobs.

        Args:
            run_bytes: of all blobs but states.
            tail_bytes: of those of them that are not full chunks.
            states_bytes: of all states.
        """
        packed_bytes = run_bytes + states_bytes
        return msgspec.structs.replace(self, packed_bytes=packed_bytes, tail_bytes=tail_bytes)


R = TypeVar("R", bound=StoredSession)


class RecordKind(Protocol[R]):
    """Names, reads and writes the records of one store. Pure; any thread."""

    def key(self, tenant: str, session_id: str) -> bytes:
        """The key under which the session's record is stored."""

    def blob_keys(self, record: R) -> list[bytes]:
        """Keys of all blobs of the session, in the order of their importance.

        The order is that of use: evicting from the end loses the least. Without the first nothing
        can be restored; all states but the newest, which only a return to an earlier point needs,
        are at the end.
        """

    def is_usable(self, record: R) -> bool:
        """True if the session's blobs are of this model and in a codec that is known here."""

    def pack(self, record: R) -> Blob:
        """The record as a blob."""

    def unpack(self, key: bytes, blob: Blob) -> R:
        """Read the record in a blob that was stored under ``key``.

        Raises:
            Corrupt: the blob is damaged and may be removed.
            Mismatch: another model, rank or release wrote it and may still need it.
        """


def codecs_of(now: Iterable[str], before: Iterable[str]) -> tuple[str, ...]:
    """The codecs a session's blobs may be in: the present ones, and those of the record before."""
    return tuple(dict.fromkeys([*now, *before]))[:MAX_CODECS]


def abandoned_chunks(
    old: Iterable[bytes], now: Iterable[bytes], current: Container[bytes]
) -> tuple[list[bytes], list[bytes]]:
    """Return the abandoned chunks to remember, the newest branch first, and those to delete.

    A branch is deleted from its end.

    Args:
        old: keys that the older record remembers.
        now: keys of the older record's own chunks.
        current: keys of the session's present blobs, which are not abandoned.
    """
    keys = [x for x in dict.fromkeys([*now, *old]) if x not in current]
    return keys[:MAX_LEFT_BEHIND], keys[MAX_LEFT_BEHIND:]
