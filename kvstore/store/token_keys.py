"""Names the blobs of a session by its tokens, and describes its record to the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from kvstore.blobs import format as blobs
from kvstore.blobs.chain import Chain, KeySpace, Tokens, common_prefix
from kvstore.blobs.packer import RECORD_CODEC, Packer
from kvstore.errors import Mismatch
from kvstore.session import by_worth
from kvstore.store.records import SessionRecord, Span, decode_record, encode_record, in_order
from kvstore.tiers.base import Blob


class TokenKeys:
    """Names the spans of sessions whose tokens are known.

    Args:
        growing: the model has layers that grow with the tokens.
        needs_state: its cache cannot be cut back, so sessions have snapshots and no tail.
    """

    def __init__(self, space: KeySpace, *, growing: bool, needs_state: bool) -> None:
        self.space = space
        self.growing = growing
        self.needs_state = needs_state

    def chain(self, record: SessionRecord) -> Chain:
        """Hash the tokens of a session."""
        return self.space.chain(record.root, record.tokens)

    def chunks(self, chain: Chain, first: int = 0, end: int | None = None) -> list[Span]:
        """Name the full chunks of these tokens; there are none without layers that grow."""
        size, names = self.space.chunk_tokens, chain.chunk_keys if self.growing else []
        number, stop = first // size, len(names) if end is None else end // size
        return [Span(x, i * size, size) for i, x in enumerate(names[number:stop], number)]

    def rows(self, chain: Chain, tenant: str, session_id: str) -> list[Span]:
        """Name all chunks, and the tail if the model has one."""
        first = chain.num_chunks * self.space.chunk_tokens
        if not self.growing or self.needs_state or first == chain.num_tokens:
            return self.chunks(chain)
        tail = Span(chain.tail_key(tenant, session_id), first, chain.num_tokens - first)
        return [*self.chunks(chain), tail]

    def state(self, chain: Chain, position: int) -> Span:
        """Name the state after ``position`` tokens, with the rows since the last full chunk."""
        rest = position % self.space.chunk_tokens
        return Span(chain.snapshot_key(position), position - rest, rest)

    def spans(self, record: SessionRecord, chain: Chain | None = None) -> list[Span]:
        """Name all spans of a session. ``chain``: of its tokens, if it was hashed before."""
        chain = chain or self.chain(record)
        states = [self.state(chain, x) for x in by_worth(record.snapshots)]
        return in_order(self.rows(chain, record.tenant, record.id), states)


class TokenPrompt:
    """A prompt of one tenant: see ``planner.Prompt``. A tail belongs to its session alone.

    Args:
        root: the start of the tenant's chains.
        boundaries: positions where a session may have left a state.
    """

    def __init__(
        self, keys: TokenKeys, root: bytes, tokens: Tokens, boundaries: Sequence[int]
    ) -> None:
        self._keys = keys
        self._root = root
        self._tokens = tokens
        self._boundaries = boundaries

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def common(self, record: SessionRecord) -> int | None:
        return common_prefix(record.tokens, self._tokens) if record.root == self._root else None

    def rows(self, record: SessionRecord) -> list[Span]:
        return self._keys.rows(self._keys.chain(record), record.tenant, record.id)

    def chunks(self, first_token: int, end_token: int) -> list[Span]:
        return self._keys.chunks(self._chain, first_token, end_token)

    def tails(self, first_token: int, end_token: int) -> list[Span]:
        return []

    def states(self, own: Sequence[int], first_token: int) -> list[Span]:
        size = self._keys.space.chunk_tokens
        # Engines take a state at a boundary, or after the last full chunk before it.
        ends = {y for x in self._boundaries for y in (x, x - x % size)}
        found = {x for x in (*own, *ends) if first_token < x <= self.num_tokens}
        return [self._keys.state(self._chain, x) for x in sorted(found, reverse=True)]

    @cached_property
    def _chain(self) -> Chain:
        return self._keys.space.chain(self._root, self._tokens)


class TokenRecords:
    """Describes records of chains of tokens to the ledger: see ``RecordKind``."""

    def __init__(self, keys: TokenKeys, packer: Packer) -> None:
        self._keys = keys
        self._packer = packer

    def key(self, tenant: str, session_id: str) -> bytes:
        return self._keys.space.record_key(tenant, session_id)

    def blob_keys(self, record: SessionRecord) -> list[bytes]:
        return [x.key for x in self._keys.spans(record)]

    def is_usable(self, record: SessionRecord) -> bool:
        ours = record.fingerprint == self._packer.fingerprint
        return ours and self._packer.reads_any(record.codecs)

    def pack(self, record: SessionRecord) -> Blob:
        key = self.key(record.tenant, record.id)
        header = self._packer.record_header(key, record.num_tokens)
        return blobs.pack(header, encode_record(record))

    def unpack(self, key: bytes, blob: Blob) -> SessionRecord:
        """Read a record of any model; callers that use it compare ``root``."""
        header, payload = blobs.parse(blob)
        if header.key != key or header.codec != RECORD_CODEC:
            raise Mismatch("the record is of another session")
        return decode_record(payload, SessionRecord)
