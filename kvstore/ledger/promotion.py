"""After a restore: bringing what was read nearer, and noting that it was used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from kvstore.blobs.chain import CHUNK
from kvstore.ledger.claims import Claims
from kvstore.ledger.index import SessionIndex
from kvstore.ledger.record import R
from kvstore.ledger.stack import TierStack
from kvstore.stats import Counters
from kvstore.tiers.base import Blob


class Promotion(Generic[R]):
    """Puts blobs of slower tiers into the fastest one, as they are. Thread-safe.

    In the fastest tier's own codec they would be smaller or quicker, but made of rows that have
    been through the other one already. The bytes are small where slower tiers have a denser codec,
    and they spare the read.
    """

    def __init__(
        self, stack: TierStack, index: SessionIndex[R], claims: Claims, counters: Counters
    ) -> None:
        self._stack = stack
        self._index = index
        self._claims = claims
        self._counters = counters

    def used(
        self,
        record_key: bytes | None,
        keys: Sequence[bytes],
        slow: Sequence[tuple[bytes, Blob]],
    ) -> None:
        """Keep near what a restore has read.

        Args:
            record_key: of the session that came back; None if the prompt was of no known session.
            keys: of all blobs that were read, in their order.
            slow: those of them that were read from a slower tier.
        """
        wanted = self._wanted(record_key, slow)
        record = None if record_key is None else self._index.get(record_key)
        if wanted and self._stack.put(0, wanted, record.tenant if record else ""):
            self._counters.add("promoted_blobs", len(wanted))
        # Meanwhile the session may have been saved, or forgotten.
        still = {key for key, _ in self._wanted(record_key, wanted)}
        self._stack.delete(0, [key for key, _ in wanted if key not in still])
        self._touch(record_key, keys)

    def _wanted(
        self, record_key: bytes | None, blobs: Sequence[tuple[bytes, Blob]]
    ) -> list[tuple[bytes, Blob]]:
        """Leave out blobs that no session needs or left behind: they may be of a forgotten one.

        A commit that is under way may be about to replace the session's tail and states.
        """
        gone = set(self._index.unused(key for key, _ in blobs))
        if record_key is not None:
            record = self._index.get(record_key)
            if record is None:
                return []
            gone -= set(self._index.owned(record))
            if self._claims.is_claimed(record_key):
                gone |= {key for key, _ in blobs if key[:1] != CHUNK}
        return [(key, blob) for key, blob in blobs if key not in gone]

    def _touch(self, record_key: bytes | None, keys: Sequence[bytes]) -> None:
        record = None if record_key is None else self._index.get(record_key)
        if record_key is None or record is None:
            self._stack.touch(keys)
            return
        chain = self._index.blob_keys(record)
        self._stack.touch([record_key, *dict.fromkeys((*keys, *chain))])
        self._index.use(record_key)
