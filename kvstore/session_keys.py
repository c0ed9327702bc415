"""All blobs of one session, by key, in the order in which they matter.

A session's blobs are its full chunks, and behind them either the tail or, for a model whose cache
cannot be cut, its snapshots. The order is that of the tokens: whoever evicts from the end loses the
least.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.chain import CHUNK, DIGEST_BYTES, Chain, KeySpace
from kvstore.records import SessionRecord


@dataclass(frozen=True)
class SessionKeys:
    chunks: list[bytes]
    tail: bytes | None
    snapshots: dict[int, bytes]  # by position, ascending

    def in_order(self, chunk_tokens: int) -> list[bytes]:
        """Chunks and snapshots by the last token they need, the tail at the end."""
        ends = [((i + 1) * chunk_tokens, key) for i, key in enumerate(self.chunks)]
        placed = sorted(ends + list(self.snapshots.items()), key=lambda x: x[0])
        return [key for _, key in placed] + ([self.tail] if self.tail else [])


class KeyMaker:
    """Knows which kinds of blobs this store's sessions have.

    Args:
        growing: the model has layers that grow with the tokens.
        needs_state: its cache cannot be cut back, so sessions have snapshots and no tail.
    """

    def __init__(self, space: KeySpace, *, growing: bool, needs_state: bool) -> None:
        self.space = space
        self.growing = growing
        self.needs_state = needs_state

    def record_key(self, record: SessionRecord) -> bytes:
        return self.space.record_key(record.tenant, record.id)

    def of(self, record: SessionRecord, chain: Chain | None = None) -> SessionKeys:
        chain = chain or self.space.chain(record.root, record.tokens)
        has_tail = self.growing and not self.needs_state and record.tail_tokens > 0
        return SessionKeys(
            chain.chunk_keys if self.growing else [],
            chain.tail_key(record.tenant, record.id) if has_tail else None,
            {x: chain.snapshot_key(x) for x in record.snapshots},
        )

    def listed(self, record: SessionRecord) -> list[bytes]:
        """``of`` in order; what must be there for all of the session to be restorable."""
        return self.of(record).in_order(self.space.chunk_tokens)


def left_behind_keys(record: SessionRecord) -> list[bytes]:
    digests = record.left_behind
    return [CHUNK + digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]
