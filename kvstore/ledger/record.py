"""The record of a session: its chain, its states and its sizes.

A record lies in the tiers beside the session's blobs and is written after them, so that a reader
that finds it also finds the blobs that it names.

A long chain is *paged*, so that a save writes only the new names and not the whole chain. Each full
page of ``PAGE_CHUNKS`` names is a blob of its own under the name of its last chunk. So two sessions
with the same beginning share its pages, and a page is never written again. The record itself holds
the names of the pages and of the chunks after the last full page. If a tier has evicted a page, the
record read from that tier ends before the page; later chunks can still be found by their names.

A save replaces the older record, whatever tokens the two share: the new chain may be longer (the
usual update), shorter (an answer is generated again), or depart from the old one half-way (an
edited message). States that are no longer kept are deleted, unless another session needs them.
Chunks of an abandoned branch stay, since the user may return to it. The record remembers their
names so that ``forget`` deletes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from kvstore.blobs import format as blobs
from kvstore.blobs.chain import (
    CHUNK,
    NAME_BYTES,
    PAGE,
    Chain,
    ChainKeys,
    Piece,
    joined,
    record_key,
    split,
)
from kvstore.blobs.packer import RECORD_CODEC, Packer
from kvstore.errors import Corrupt, Mismatch, Unusable
from kvstore.session import by_worth
from kvstore.tiers.base import Blob

PAGE_CHUNKS: Final = 128
PAGE_CODEC: Final = b"names.1"
MAX_LEFT_BEHIND: Final = 1024  # chunks of abandoned branches that a record remembers
MAX_STATES: Final = 16  # far more than a save keeps; bounds the blobs that a record can name


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A session as the cold store knows it.

    Args:
        chain: the names of its chunks, ``NAME_BYTES`` each.
        states: the numbers of chunks after which a state is stored, ascending.
        last_used_s: wall-clock seconds; also decides which of several copies is the newest.
        packed_bytes: the size of all its blobs, headers included, except this record and its pages.
        left_behind: names of chunks that it no longer uses since its history was edited. They can
            still be found by content.
        note: bytes that only the engine reads, the same number for each chunk; b"" = none.
    """

    tenant: str
    id: str
    fingerprint: str
    chunk_tokens: int
    chain: bytes
    states: tuple[int, ...] = ()
    last_used_s: float
    pinned: bool = False
    packed_bytes: int = 0
    left_behind: bytes = b""
    note: bytes = b""

    @property
    def num_chunks(self) -> int:
        return len(self.chain) // NAME_BYTES

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV is stored."""
        return self.num_chunks * self.chunk_tokens

    @property
    def names(self) -> list[bytes]:
        """The chain as a list."""
        return split(self.chain)

    def name_of(self, number: int) -> bytes:
        """Return the name of a chunk; the first one has number 0."""
        return self.chain[number * NAME_BYTES : (number + 1) * NAME_BYTES]

    @property
    def nbytes(self) -> int:
        """Memory that the record takes, in bytes."""
        return len(self.chain) + len(self.left_behind) + len(self.note)

    @property
    def abandoned(self) -> list[bytes]:
        """Keys of the chunks in ``left_behind``, to which the user may return."""
        return [CHUNK + x for x in split(self.left_behind)]

    def makes_sense(self) -> bool:
        """Return whether the fields of the record agree with each other."""
        odd = len(self.chain) % NAME_BYTES or len(self.left_behind) % NAME_BYTES
        steps = zip(self.states, self.states[1:], strict=False)
        return (
            not odd
            and self.chunk_tokens > 0
            and not (self.note and (not self.chain or len(self.note) % self.num_chunks))
            and len(self.states) <= MAX_STATES
            and all(0 < x <= self.num_chunks for x in self.states)
            and all(a < b for a, b in steps)
        )


class _Head(msgspec.Struct, frozen=True):
    """The blob under a record's key: the record without the chunks of its full pages."""

    record: SessionRecord
    pages: tuple[bytes, ...]
    states: tuple[int, ...]


# Reads blobs by key; None for those that are gone.
ReadBlobs: TypeAlias = Callable[[Sequence[bytes]], Sequence[Blob | None]]


class Records:
    """Packs and unpacks the records of one model and lists their keys. Pure; for any thread.

    Args:
        model: the name that enters the keys of records; each rank of a model has another one.
    """

    def __init__(self, model: str, packer: Packer, keys: ChainKeys) -> None:
        self._model = model
        self._packer = packer
        self.keys = keys

    def key(self, tenant: str, session_id: str) -> bytes:
        """Return the key under which the session's record is stored."""
        return record_key(tenant, session_id, self._model)

    def blob_keys(self, record: SessionRecord) -> list[bytes]:
        """Return the keys of all blobs of the session, in the order of its tokens.

        Window rows, pages and states come after the chunk at whose end they are. Since a tier
        evicts from the end, an older state or a shorter chain stays restorable.
        """
        if record.states:
            return [x.key for x in self.pieces(record)]
        return self._row_keys(record, 0)

    def counted_keys(self, record: SessionRecord, first: int) -> list[bytes]:
        """Return the keys of all blobs of the session except its first chunks, in any order.

        Args:
            first: the number of chunks that are left out, with their pages.
        """
        return [*self._row_keys(record, first), *(x.key for x in self._of_states(record))]

    def keys_beside(self, record: SessionRecord) -> list[bytes]:
        """Return the keys of the session's pages, states and windows, without its chunks."""
        return [*self.page_keys(record), *(x.key for x in self._of_states(record))]

    def page_keys(self, record: SessionRecord) -> list[bytes]:
        """Return the keys of the full pages of the session's chain."""
        return [PAGE + x for x in _page_names(record)]

    def _row_keys(self, record: SessionRecord, first: int) -> list[bytes]:
        """Return the keys of the chunks from ``first`` on, each full page after its last chunk."""
        names, keys = split(record.chain[first * NAME_BYTES :]), list[bytes]()
        done = 0
        while done < len(names):
            end = done + PAGE_CHUNKS - (first + done) % PAGE_CHUNKS
            if self.keys.growing:
                keys += [CHUNK + x for x in names[done:end]]
            if end <= len(names):
                keys.append(PAGE + names[end - 1])
            done = end
        return keys

    def needed_keys(self, record: SessionRecord) -> list[bytes]:
        """Return the keys of the blobs that a turn needs to continue where the session ended."""
        newest = by_worth(record.states)[:1]
        if not newest:
            return self._row_keys(record, 0)
        return [x.key for x in self._ordered(record.names, newest)]

    def pieces(self, record: SessionRecord) -> list[Piece]:
        """List all blobs of the session, in the order of ``blob_keys``."""
        return self._ordered(record.names, by_worth(record.states))

    def _ordered(self, chain: Chain, states: Sequence[int]) -> list[Piece]:
        pieces: list[Piece] = []
        for i in range(0, len(chain), PAGE_CHUNKS):
            end = i + PAGE_CHUNKS
            pieces += self.keys.chunks(chain, i, end)
            if end <= len(chain):
                pieces.append(Piece(PAGE + chain[end - 1], end * self.keys.chunk_tokens, 0))
        if states:
            of_states = [y for x in states for y in self._of_state(chain, x)]
            pieces += dict.fromkeys(of_states)  # states share windows
            pieces.sort(key=lambda x: x.end_token)  # stable
        return pieces

    def _of_states(self, record: SessionRecord) -> list[Piece]:
        chain = record.names if record.states else []
        return [*dict.fromkeys(y for x in record.states for y in self._of_state(chain, x))]

    def _of_state(self, chain: Chain, num_chunks: int) -> list[Piece]:
        return [self.keys.state(chain, num_chunks), *self.keys.windows(chain, num_chunks)]

    def sized_keys(self, record: SessionRecord, first: int = 0) -> list[bytes]:
        """Return the keys of the blobs that ``packed_bytes`` counts, from chunk ``first`` on."""
        return [x for x in self.counted_keys(record, first) if x[:1] != PAGE]

    def is_usable(self, record: SessionRecord) -> bool:
        """Return whether the session has this model's fingerprint and this chunk size."""
        ours = (self._packer.fingerprint, self.keys.chunk_tokens)
        return (record.fingerprint, record.chunk_tokens) == ours

    # ---- as blobs

    def pack(self, record: SessionRecord) -> Blob:
        """Return the record as a blob, without its full pages, which are blobs of their own."""
        names = _page_names(record)
        cut = len(names) * PAGE_CHUNKS
        rest = replace(
            record,
            chain=record.chain[cut * NAME_BYTES :],
            states=(),
            note=record.note[cut * _note_bytes(record) :],
        )
        payload = msgspec.msgpack.encode(_Head(rest, tuple(names), record.states))
        header = self._packer.record_header(self.key(record.tenant, record.id))
        return blobs.pack(header, payload)

    def pack_page(self, record: SessionRecord, key: bytes) -> Blob:
        """Return the page of the session's chain that has this key."""
        first = _page_names(record).index(key[1:]) * PAGE_CHUNKS
        end, size = first + PAGE_CHUNKS, _note_bytes(record)
        names = record.chain[first * NAME_BYTES : end * NAME_BYTES]
        note = record.note[first * size : end * size]
        return blobs.pack(self._packer.record_header(key, PAGE_CODEC), names + note)

    def unpack(self, key: bytes, blob: Blob, read: ReadBlobs) -> SessionRecord:
        """Return the record in a blob that was stored under ``key``. It may be of any model.

        Args:
            read: reads the record's pages from the tier of the blob.

        Raises:
            Corrupt: the blob is damaged and may be removed.
            Mismatch: the blob is of another session, or of another release.
        """
        header, payload = blobs.parse(blob)
        if header.key != key or header.codec != RECORD_CODEC:
            raise Mismatch("the record is of another session")
        try:
            head = msgspec.msgpack.decode(payload, type=_Head)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Corrupt(f"not a session record: {error}") from error
        names = {*head.pages}  # a page that is named again would be read again
        if len(names) < len(head.pages) or any(len(x) != NAME_BYTES for x in names):
            raise Corrupt("a session record names impossible pages")
        record = replace(head.record, states=head.states)
        if head.pages:
            record = _with_pages(record, head.pages, read([PAGE + x for x in head.pages]))
        if not record.makes_sense():
            raise Corrupt("a session record contradicts itself")
        return record


def _page_names(record: SessionRecord) -> list[bytes]:
    size = PAGE_CHUNKS * NAME_BYTES
    ends = range(size, len(record.chain) + 1, size)
    return [record.chain[x - NAME_BYTES : x] for x in ends]


def _note_bytes(record: SessionRecord) -> int:
    return len(record.note) // record.num_chunks if record.note else 0


def _with_pages(
    record: SessionRecord, names: Sequence[bytes], pages: Sequence[Blob | None]
) -> SessionRecord:
    """Return the record with the whole chain: the names in its pages, then its own.

    The chain ends before the first page that is gone or damaged.
    """
    parts: list[memoryview] = []
    for name, page in zip(names, pages, strict=True):
        payload = None if page is None else _page_in(page, PAGE + name)
        if payload is None:
            record = replace(record, chain=b"", note=b"")
            break
        parts.append(payload)
    size = PAGE_CHUNKS * NAME_BYTES
    chain = b"".join((*(x[:size] for x in parts), record.chain))
    note = b"".join((*(x[size:] for x in parts), record.note))
    count = len(chain) // NAME_BYTES
    even = bool(count) and not len(note) % count
    states = tuple(x for x in record.states if x <= count)
    return replace(record, chain=chain, note=note if even else b"", states=states)


def _page_in(page: Blob, key: bytes) -> memoryview | None:
    try:
        header, payload = blobs.parse(page)
    except Unusable:
        return None
    end = payload[(PAGE_CHUNKS - 1) * NAME_BYTES : PAGE_CHUNKS * NAME_BYTES]
    return payload if (header.key, header.codec, bytes(end)) == (key, PAGE_CODEC, key[1:]) else None


def abandoned_chunks(old: SessionRecord, chain: Chain, common: int) -> tuple[bytes, list[bytes]]:
    """Return the joined names of abandoned chunks to remember, and the keys of chunks to delete.

    The chunks beyond ``MAX_LEFT_BEHIND`` are deleted: those of older branches, and the end of a
    branch before its beginning.

    Args:
        old: the older record.
        chain: the chain of the new record.
        common: how many chunks both chains begin with.
    """
    known = [*split(old.chain[common * NAME_BYTES :]), *split(old.left_behind)]
    if not known:
        return b"", []
    current = {*chain}
    names = [x for x in dict.fromkeys(known) if x not in current]
    return joined(names[:MAX_LEFT_BEHIND]), [CHUNK + x for x in names[MAX_LEFT_BEHIND:]]
