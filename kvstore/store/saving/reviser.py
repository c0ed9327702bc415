"""Merges a new save into a session's older record.

The new record replaces the old one regardless of the tokens they share: the new chain may be longer
(the usual update), shorter (an answer is generated again), or depart from the old one half-way (an
edited message). An old tail or part is deleted, and so are states that are no longer kept, unless
another session needs them. Chunks of an abandoned branch stay, since the user may return to it; the
record remembers them so that ``forget`` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic

from msgspec.structs import replace

from kvstore.blobs.chain import CHUNK
from kvstore.blobs.packer import Packer
from kvstore.ledger.index import SessionIndex
from kvstore.ledger.record import R, StoredSession, abandoned_chunks, codecs_of
from kvstore.store.spans import Span
from kvstore.tiers.base import Blob


class Reviser(Generic[R]):
    """Completes the new record of a session at a save. Thread-safe."""

    def __init__(self, index: SessionIndex[R], packer: Packer, chunk_tokens: int) -> None:
        self._index = index
        self._packer = packer
        self._chunk_tokens = chunk_tokens

    def revise(
        self,
        record: R,
        old: R | None,
        common: int,
        spans: Sequence[Span],
        fresh: Mapping[bytes, Blob],
    ) -> tuple[R, list[bytes]]:
        """Return the whole record, and keys of blobs that are unused once it is written.

        Args:
            record: the new record, without sizes, codecs and all else that follows from the old.
            common: the leading tokens that the two share.
            spans: all of the new record.
            fresh: new blobs among them, by key.
        """
        rows = [x for x in spans if not x.is_state]
        run_bytes, tail_bytes = self._run_bytes(rows, fresh, old, common)
        states_bytes = _states_bytes([x for x in spans if x.is_state], fresh, old)
        record = record.resized(run_bytes, tail_bytes, states_bytes)
        if old is None:
            return replace(record, codecs=codecs_of(self._packer.readable, ())), []
        current = {x.key for x in spans}
        before = [x for x in self._index.blob_keys(old) if x not in current]
        chunks = [x for x in before if x[:1] == CHUNK]
        left, overflow = abandoned_chunks(old.abandoned, chunks, current)
        gone = [*(x for x in before if x[:1] != CHUNK), *overflow]
        codecs = codecs_of(self._packer.readable, old.codecs)
        record = replace(record.abandoning(left), codecs=codecs, pinned=old.pinned)
        return record, self._index.unshared(gone, self._index.key(old))

    def _run_bytes(
        self, rows: Sequence[Span], fresh: Mapping[bytes, Blob], old: R | None, common: int
    ) -> tuple[int, int]:
        """Return the bytes of all rows, and of those after the last full chunk.

        Older chunks are in the codec of their own save.
        """
        known, total, tail_bytes = 0, 0, 0
        if old is not None and old.tail_bytes is not None:
            known = min(common // self._chunk_tokens, sum(x.is_chunk for x in rows))
            chunk_bytes = max(old.packed_bytes - old.tail_bytes - old.states_bytes, 0)
            num_chunks = max(old.num_tokens // self._chunk_tokens, 1)
            total = chunk_bytes * known // num_chunks
        for span in rows[known:]:
            blob = fresh.get(span.key)
            if blob is not None:
                nbytes = len(blob)
            else:
                nbytes = self._packer.run_nbytes(span.first_token, span.num_tokens)
            total += nbytes
            tail_bytes += 0 if span.is_chunk else nbytes
        return total, tail_bytes


def _states_bytes(
    states: Sequence[Span], fresh: Mapping[bytes, Blob], old: StoredSession | None
) -> int:
    """Estimate the bytes of all states: those of one session are about equally large."""
    sizes = [len(fresh[x.key]) for x in states if x.key in fresh]
    if sizes:
        return len(states) * sum(sizes) // len(sizes)
    if old is None or not old.state_positions:
        return 0
    return old.states_bytes * len(states) // len(old.state_positions)
