"""After a restore: what was read is worth keeping near."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.chain import CHUNK
from kvstore.matcher import Match
from kvstore.save_queue import SaveQueue
from kvstore.session_index import SessionIndex
from kvstore.session_keys import KeyMaker
from kvstore.stats import Counters
from kvstore.tier_stack import TierStack
from kvstore.tiers.base import Blob


class Promotion:
    """Puts blobs of slower tiers into the fastest one, as they are.

    In the fastest tier's own codec they would be smaller or quicker, but made of rows that have
    been through the other one already. The bytes are small where slower tiers have a denser codec,
    and they spare the read.
    """

    def __init__(
        self,
        stack: TierStack,
        index: SessionIndex,
        keys: KeyMaker,
        queue: SaveQueue,
        counters: Counters,
    ) -> None:
        self._stack = stack
        self._index = index
        self._keys = keys
        self._queue = queue
        self._counters = counters

    def used(self, match: Match, num_tokens: int, slow: Sequence[tuple[bytes, Blob]]) -> None:
        """``num_tokens`` of the match were restored, ``slow`` among it was not in the fastest."""
        record_key = match.record_key
        if not num_tokens or (record_key and self._index.get(record_key) is None):
            return
        stale = self._stale(record_key, slow)
        wanted = [(key, blob) for key, blob in slow if key not in stale]
        if wanted and self._stack.put(0, wanted):
            self._counters.add("promoted_blobs", len(wanted))
        # The session may have been saved meanwhile: what it let go of must not come back.
        self._stack.delete(0, sorted(self._stale(record_key, wanted)))
        chain = [x.key for x in match.pieces]
        self._stack.touch([record_key, *chain] if record_key else chain)
        if record_key:
            self._index.use(record_key)

    def _stale(self, record_key: bytes | None, blobs: Sequence[tuple[bytes, Blob]]) -> set[bytes]:
        """Tails and states that the session does not have any more, or may be about to lose."""
        own = {key for key, _ in blobs if key[:1] != CHUNK}
        if not own or record_key is None:
            return set()
        record = self._index.get(record_key)
        if record is None or not self._queue.settled(record_key):
            return own
        return own.difference(self._keys.listed(record))
