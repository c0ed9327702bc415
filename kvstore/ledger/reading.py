"""Reads blobs: finds good copies, and promotes restored blobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvstore.blobs.chain import CHUNK, chunk_before, stretches
from kvstore.errors import ForeignCodec, RefusedCodec, TierUnavailable, Unusable
from kvstore.ledger.index import Claims, SessionIndex
from kvstore.ledger.record import SessionRecord
from kvstore.ledger.stack import TierStack
from kvstore.session import MissReason
from kvstore.stats import Counters
from kvstore.tiers.base import Blob

T = TypeVar("T")

_log = logging.getLogger(__name__)


class GoodCopy(NamedTuple, Generic[T]):
    """The copy that was accepted, the level of its tier, and the result of using it."""

    blob: Blob
    level: int
    value: T


class CopyReader:
    """Falls back from tier to tier, and mends or removes copies that are bad. Thread-safe.

    Args:
        unused: lists those of some keys that no session needs; None = all are needed.
    """

    def __init__(
        self,
        stack: TierStack,
        counters: Counters,
        unused: Callable[[Iterable[bytes]], list[bytes]] | None = None,
    ) -> None:
        self._stack = stack
        self._counters = counters
        self._unused = unused or (lambda keys: [])

    def read(
        self,
        key: bytes,
        levels: Iterable[int],
        use: Callable[[Blob], T],
        asked: Callable[[int], Blob | None] | None = None,
    ) -> GoodCopy[T] | MissReason:
        """Give ``use`` one copy of the blob after another until it accepts one.

        Args:
            levels: tiers to ask, in this order.
            use: verifies the copy, and may unpack it; raises ``Unusable`` to reject it.
            asked: replaces the reading of a tier, if a copy was read before; raises
                ``TierUnavailable`` as a tier does.

        Returns:
            The good copy, or why there is none.
        """
        reason: MissReason = "evicted"
        get = asked or (lambda level: self._stack.get(level, [key])[0])
        bad: list[int] = []
        good: GoodCopy[T] | None = None
        for level in levels:
            try:
                blob = get(level)
                if blob is not None:
                    good = GoodCopy(blob, level, use(blob))
                    break
            except TierUnavailable:
                reason = "unavailable" if reason == "evicted" else reason
            except ForeignCodec as error:  # held, for those that can read it
                reason = "fingerprint"
                if isinstance(error, RefusedCodec) and level not in self._stack.shared:
                    bad.append(level)  # else no readable copy would be stored
            except Unusable as error:
                reason = "corrupt"
                self._counters.add("corrupt")
                _log.warning("a bad blob in %s: %s", self._stack.name(level), error)
                bad.append(level)
        for level in bad:
            # In its place, since a tier would give up all that continues a chunk that is deleted.
            is_mended = good is not None and self._stack.replace(level, key, good.blob)
            if not is_mended or self._unused([key]):  # its session may be forgotten by now
                self._stack.delete(level, [key])
        return good or reason


class Promotion:
    """Puts blobs of slower tiers into the fastest one, as they are. Thread-safe."""

    def __init__(
        self, stack: TierStack, index: SessionIndex, claims: Claims, counters: Counters
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
        """Put the blobs of a restore into the fastest tier, and mark them as used.

        Args:
            record_key: of the returning session; None if the prompt was of no known session.
            keys: of all blobs that were read, in their order.
            slow: those of them that were read from a slower tier.
        """
        self._touch(record_key, keys)  # before they grow: the order learns how much was held
        wanted = dict(self._wanted(record_key, slow))
        if not wanted:
            return
        record = None if record_key is None else self._index.get(record_key)
        self._put(keys, wanted, record)
        # Meanwhile the session may have been saved, or forgotten.
        gone = wanted.keys() - {key for key, _ in self._wanted(record_key, [*wanted.items()])}
        if record_key is not None and self._index.get(record_key) is None:
            gone.add(record_key)
        self._stack.delete(0, [*gone])

    def _put(
        self, keys: Sequence[bytes], blobs: Mapping[bytes, Blob], record: SessionRecord | None
    ) -> None:
        """Put blobs into the fastest tier, each after the chunk before it in their chain.

        Args:
            keys: of all blobs that were read.
        """
        chain = keys if record is None else self._index.blob_keys(record)
        if not blobs.keys() <= set(chain):  # the prompt continued as another session does
            chain = keys
        tenant = record.tenant if record else ""
        for stretch in stretches(chain, blobs):
            items = [(key, blobs[key]) for key in stretch]
            if self._stack.put(0, items, tenant, chunk_before(chain, stretch[0])):
                self._counters.add("promoted_blobs", len(items))
        if record is not None and record.pinned:  # with its record they are evicted last
            blob, end = self._index.records.pack(record), self._stack.last_held(0, chain)
            self._stack.replace(0, self._index.key(record), blob, tenant, end)

    def _wanted(
        self, record_key: bytes | None, blobs: Sequence[tuple[bytes, Blob]]
    ) -> list[tuple[bytes, Blob]]:
        """Leave out blobs that no session uses or used: they may be of a forgotten session.

        Also leave out states that a save in progress may be about to delete.
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
