"""Merges a new save into the older record of a session of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvstore.blobs.packer import Packer
from kvstore.kept_states import kept_states
from kvstore.ledger.index import SessionIndex
from kvstore.ledger.record import abandoned_chunks, bytes_of_leading, codecs_of
from kvstore.session import SessionRef
from kvstore.store.block_keys import BlockKeys
from kvstore.store.records import ID_BYTES, BlockRecord, common_blocks
from kvstore.store.spans import Span
from kvstore.tiers.base import Blob


class BlockReviser:
    """Makes the new record of a session at a save. Thread-safe."""

    def __init__(
        self,
        keys: BlockKeys,
        index: SessionIndex[BlockRecord],
        packer: Packer,
        clock: Callable[[], float],
        max_states: int,
    ) -> None:
        self._keys = keys
        self._index = index
        self._packer = packer
        self._clock = clock
        self._max_states = max_states

    def revise(
        self,
        session: SessionRef,
        hashes: Sequence[bytes],
        old: BlockRecord | None,
        fresh: Mapping[bytes, Blob],
        states: Sequence[int],
        part: Sequence[int],
        ids: bytes = b"",
    ) -> tuple[BlockRecord, list[bytes]]:
        """Return the new record, and keys of blobs that are unused once it is written."""
        chain = self._keys.covering(hashes, part)
        states = kept_states(states or _still_good(old, hashes), self._max_states)
        state_keys = [self._keys.state(hashes, x).key for x in states]
        state_bytes = max((len(fresh[x]) for x in state_keys if x in fresh), default=0)
        state_bytes = state_bytes or (old.state_bytes if old else 0)
        run_bytes, tail_bytes = self._chain_bytes(hashes, chain, fresh, old)
        record = BlockRecord(
            tenant=session.tenant,
            id=session.id,
            hashes=b"".join(hashes),
            block_tokens=self._keys.block_tokens,
            last_used_s=self._clock(),
            codecs=codecs_of(self._packer.readable, old.codecs if old else ()),
            pinned=old.pinned if old else False,
            packed_bytes=run_bytes + len(states) * state_bytes,
            tail_bytes=tail_bytes,
            states=states,
            state_bytes=state_bytes,
            part=tuple(part),
            ids=ids or _known_ids(old, hashes),
        )
        if old is None:
            return record, []
        current = {*(x.key for x in chain), *state_keys}
        before = [x for x in self._keys.spans(old) if x.key not in current]
        # A tail or part that grew has no use any more, nor has a state before a later one; chunks
        # of another branch may still be requested.
        tails = [x.key for x in before if not x.is_chunk]
        chunks = [x.key for x in before if x.is_chunk]
        left, overflow = abandoned_chunks(old.left_behind, chunks, current)
        record = msgspec.structs.replace(record, left_behind=tuple(left))
        return record, self._index.unshared([*tails, *overflow], self._index.key(old))

    def _chain_bytes(
        self,
        hashes: Sequence[bytes],
        chain: list[Span],
        fresh: Mapping[bytes, Blob],
        old: BlockRecord | None,
    ) -> tuple[int, int]:
        """Return the bytes of all blobs with rows, and of those after the last full chunk."""
        known, total = self._known_bytes(hashes, old)
        tail_bytes = 0
        for span in chain[known:]:
            blob = fresh.get(span.key)
            nbytes = self._packer.run_nbytes(span.first_token, span.num_tokens)
            nbytes = nbytes if blob is None else len(blob)
            total += nbytes
            tail_bytes += 0 if span.is_chunk else nbytes
        return total, tail_bytes

    def _known_bytes(self, hashes: Sequence[bytes], old: BlockRecord | None) -> tuple[int, int]:
        """Count the leading chunks that the older record also has, and return their bytes there."""
        size = self._keys.chunk_blocks
        known = common_blocks(old.block_hashes, hashes) // size if old else 0
        if old is None or old.tail_bytes is None or not known:
            return 0, 0
        rest = old.tail_bytes + len(old.states) * old.state_bytes
        num_chunks = len(old.block_hashes) // size
        return known, bytes_of_leading(known, num_chunks, old.packed_bytes, rest)


def _still_good(old: BlockRecord | None, hashes: Sequence[bytes]) -> Sequence[int]:
    """Find the states of the older record that are also on the new chain."""
    if old is None or not old.states:
        return ()
    common = common_blocks(old.block_hashes, hashes)
    return [x for x in old.states if x <= common]


def _known_ids(old: BlockRecord | None, hashes: Sequence[bytes]) -> bytes:
    """Return the token ids that the older record has of the blocks that the session still has."""
    if old is None or not old.ids:
        return b""
    return old.ids[: common_blocks(old.block_hashes, hashes) * old.block_tokens * ID_BYTES]
