"""Writes sessions into the tiers: at once to the fastest, soon after to the slower ones.

``WriteBehind`` writes to one slower tier on a thread of its own, through a bounded queue. If a
delivery was skipped or cut short, the tier keeps an older, valid record, and perhaps some newer
chunks. The tier is then *behind* with this session. The next save, a demotion or a flush catches
up, and reads the missing blobs from the faster tiers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from kvstore.blobs.chain import CHUNK, chunk_before, stretches
from kvstore.ledger.index import Claims, SessionIndex
from kvstore.ledger.record import SessionRecord
from kvstore.ledger.stack import TierStack
from kvstore.stats import Counters
from kvstore.tiers.base import Blob

# The most sessions that are remembered as behind, since a tier that is down for days would fill the
# list. The oldest is dropped from it; its next save writes all that is missing.
MAX_INCOMPLETE: Final = 65_536
WRITE_BATCH: Final = 16  # blobs per call to a tier

_log = logging.getLogger(__name__)


class Delivery(msgspec.Struct, frozen=True):
    """The blobs and the record of one save of one session, to be written to a tier.

    Args:
        chain: keys of every blob that the record needs, in order.
        fresh: the blobs that this save made, still in memory, by key.
        obsolete: keys of blobs that the older record needed and no record needs now.
        tenant: the session's.
        first: the index in ``chain`` of the last chunk before the first fresh blob. A tier of this
            machine that holds this chunk also holds all before it; 0 = look up each blob.
        done: receives whether all of it was written; None = no caller waits for that.
    """

    record_key: bytes
    record: Blob
    chain: Sequence[bytes]
    fresh: Mapping[bytes, Blob] = {}
    obsolete: Sequence[bytes] = ()
    tenant: str = ""
    first: int = 0
    done: Future[bool] | None = None

    def end(self, is_written: bool) -> None:
        """Set the result of ``done``, if a caller waits for it."""
        if self.done is not None:
            self.done.set_result(is_written)

    @property
    def nbytes(self) -> int:
        """Packed bytes that wait in memory."""
        return len(self.record) + sum(map(len, self.fresh.values()))


class Delivered(NamedTuple):
    recorded: bool  # the tier's record is now the new one
    complete: bool  # and no blob that it needs is missing


def deliver(stack: TierStack, level: int, delivery: Delivery, *, whole: bool) -> Delivered:
    """Write a delivery to one tier. A tier that cannot take all of it keeps its older record.

    Args:
        whole: also copy the blobs of older saves that the tier lacks from the faster tiers;
            otherwise only the fresh blobs are written.
    """
    first = delivery.first
    if first and (level in stack.shared or not stack.holds(level, [delivery.chain[first]])[0]):
        first = 0
    chain = delivery.chain[first:]
    wanted = chain if whole else [x for x in chain if x in delivery.fresh]
    held = stack.holds(level, wanted)
    missing = {key for key, there in zip(wanted, held, strict=True) if not there}
    complete = _write(stack, level, delivery, chain, missing)
    # A part of the session is better than none, but not better than an older record that is whole.
    if not complete and stack.may_hold(level, delivery.record_key):
        return Delivered(False, False)
    end = stack.last_held(level, chain)
    if not stack.replace(level, delivery.record_key, delivery.record, delivery.tenant, end):
        return Delivered(False, False)
    stack.saved_by(level, delivery.tenant, [delivery.record_key, *chain])
    return Delivered(True, stack.delete(level, delivery.obsolete) and complete)


def _write(
    stack: TierStack,
    level: int,
    delivery: Delivery,
    chain: Sequence[bytes],
    missing: Container[bytes],
) -> bool:
    """Write the missing blobs of a chain to a tier; return whether all were found and written."""
    batches = (
        keys[i : i + WRITE_BATCH]
        for keys in stretches(chain, missing)
        for i in range(0, len(keys), WRITE_BATCH)
    )
    return all(_write_batch(stack, level, delivery, x, chunk_before(chain, x[0])) for x in batches)


def _write_batch(
    stack: TierStack, level: int, delivery: Delivery, keys: Sequence[bytes], after: bytes
) -> bool:
    blobs = {key: delivery.fresh[key] for key in keys if key in delivery.fresh}
    for faster in range(level):
        rest = [key for key in keys if key not in blobs]
        found = stack.find(faster, rest) if rest else []
        blobs |= {key: x for key, x in zip(rest, found, strict=True) if x is not None}
    items = [(key, blobs[key]) for key in keys if key in blobs]
    return stack.put(level, items, delivery.tenant, after) and len(items) == len(keys)


class WriteBehind:
    """The queue of deliveries to one slower tier, and the thread that writes them. Thread-safe.

    Args:
        level: the level of the tier in ``stack``.
        max_bytes: bound on packed bytes that wait; an empty queue takes a delivery of any size.
        unused: returns those of the given keys that no session needs.
        max_behind: bound on the sessions remembered as behind.
    """

    def __init__(
        self,
        stack: TierStack,
        level: int,
        max_bytes: int,
        counters: Counters,
        unused: Callable[[Sequence[bytes]], Sequence[bytes]] = list,
        *,
        max_behind: int = MAX_INCOMPLETE,
    ) -> None:
        self._stack = stack
        self._level = level
        self._max_bytes = max_bytes
        self._max_behind = max_behind
        self._counters = counters
        self._changed = threading.Condition()
        self._unused = unused
        self._waiting: deque[tuple[int, Delivery]] = deque()  # by number, see ``_num_offered``
        self._num_offered = 0
        self._nbytes = 0  # waiting and being written
        self._current: bytes | None = None  # record key of the session that is being written
        # By record key: the number of the newest delivery that failed; the oldest first.
        self._behind: dict[bytes, int] = {}
        # By record key: blobs that failed deliveries should have deleted. The next one does it.
        self._obsolete: dict[bytes, Sequence[bytes]] = {}
        self._closed = False
        name = f"kvstore-write-{stack.name(level)}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def offer(self, delivery: Delivery) -> None:
        """Queue a delivery without waiting. If the queue is full, the tier is behind with it."""
        with self._changed:
            self._num_offered += 1
            number = self._num_offered
            full = self._nbytes and self._nbytes + delivery.nbytes > self._max_bytes
            refused = full or self._closed
            if not refused:
                self._waiting.append((number, delivery))
                self._nbytes += delivery.nbytes
                self._changed.notify_all()
        if refused:
            self._settle(number, delivery, False)

    def take_behind(self) -> set[bytes]:
        """Return and clear the record keys of sessions whose newest save did not reach the tier.

        The caller sends these sessions again.
        """
        with self._changed:
            behind, self._behind = self._behind, {}
            return set(behind)

    def cancel(self, record_key: bytes) -> None:
        """Drop the waiting deliveries of a session, and wait until a running one has ended."""
        with self._changed:
            dropped = [x for _, x in self._waiting if x.record_key == record_key]
            self._waiting = deque(x for x in self._waiting if x[1].record_key != record_key)
            self._nbytes -= sum(x.nbytes for x in dropped)
            self._changed.wait_for(lambda: self._current != record_key)
            self._behind.pop(record_key, None)
            owed = self._obsolete.pop(record_key, ())
        obsolete = [key for x in dropped for key in x.obsolete]
        self._stack.delete(self._level, self._unused([*owed, *obsolete]))
        for delivery in dropped:
            delivery.end(False)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no delivery is waiting or being written; return False if time ran out."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and self._current is None, timeout_s
            )

    def close(self) -> None:
        """Stop the thread; waiting deliveries are dropped."""
        with self._changed:
            self._closed = True
            dropped, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for _, delivery in dropped:
            delivery.end(False)
        self._thread.join()

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Wait for the next delivery and write it; return False once closed.

        A separate function, so that no local variable keeps blobs in memory during the next wait.
        """
        if (found := self._next()) is None:
            return False
        number, delivery = found
        self._write(number, delivery)
        with self._changed:
            self._nbytes -= delivery.nbytes
            self._current = None
            self._changed.notify_all()
        return True

    def _write(self, number: int, delivery: Delivery) -> None:
        delivery, is_complete = self._with_owed(delivery), False
        if delivery.record_key in self._behind:
            delivery = replace(delivery, first=0)
        try:
            is_complete = deliver(self._stack, self._level, delivery, whole=True).complete
        except Exception:  # the outermost frame of this thread: a defect in a tier must not end it
            _log.exception("writing to %s failed", self._stack.name(self._level))
        self._settle(number, delivery, is_complete)

    def _next(self) -> tuple[int, Delivery] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            number, delivery = self._waiting.popleft()
            self._current = delivery.record_key
            return number, delivery

    def _with_owed(self, delivery: Delivery) -> Delivery:
        """Return the delivery with the keys that failed deliveries should have deleted.

        Keys that a session needs by now are left out.
        """
        with self._changed:
            owed = self._obsolete.pop(delivery.record_key, ())
        if not owed and not delivery.obsolete:
            return delivery
        chain = set(delivery.chain)
        still = [x for x in self._unused([*owed, *delivery.obsolete]) if x not in chain]
        return replace(delivery, obsolete=still)

    def _settle(self, number: int, delivery: Delivery, complete: bool) -> None:
        """Record the outcome of a delivery, and set the result for a caller that waits."""
        if not complete:
            self._counters.add(f"behind.{self._stack.name(self._level)}")
        key = delivery.record_key
        with self._changed:
            if self._behind.get(key, 0) <= number:  # else a newer save is missing already
                self._behind.pop(key, None)
                if not complete:
                    self._behind[key] = number
            if not complete and delivery.obsolete:
                self._obsolete[key] = [*self._obsolete.get(key, ()), *delivery.obsolete]
            for remembered in (self._behind, self._obsolete):
                if len(remembered) > self._max_behind:
                    del remembered[next(iter(remembered))]
        delivery.end(complete)


class Committer:
    """Writes records and their blobs to all tiers, and puts the records into the index.

    Thread-safe if the caller has claimed the session that it commits.

    A record reaches a slower tier only through that tier's queue, so an older record that still
    waits there is never written after it.
    """

    def __init__(
        self,
        stack: TierStack,
        slower: Sequence[WriteBehind],
        index: SessionIndex,
    ) -> None:
        self._stack = stack
        self._slower = slower
        self._index = index

    def save(
        self, record: SessionRecord, fresh: Mapping[bytes, Blob], obsolete: Sequence[bytes]
    ) -> bool:
        """Write a session into the fastest tier, and queue it for the slower ones.

        Args:
            fresh: new blobs by key.
            obsolete: keys of blobs that are unused once the record is written.

        Returns:
            Whether a tier has taken the record or will try to; if not, nothing has changed.
        """
        if not len(self._stack):
            return False
        delivery = self._delivery(record, fresh, obsolete)
        if not deliver(self._stack, 0, delivery, whole=False).recorded and not self._slower:
            return False
        self.take(record)
        for tier in self._slower:
            tier.offer(delivery)
        return True

    def take(self, record: SessionRecord) -> None:
        """Put a record into the index, and pin or unpin its session in the tiers as it says."""
        self._index.put(record)
        self._stack.pin(self._index.key(record), record.pinned)

    def rewrite(self, record: SessionRecord) -> bool:
        """Write a changed record whose blobs stay the same to every tier; returns as ``save``."""
        return self.save(record, {}, ())

    def send(self, level: int, record: SessionRecord) -> Future[bool]:
        """Queue a claimed session for one slower tier.

        The future's result is whether the tier then has all of it.
        """
        done: Future[bool] = Future()
        delivery = self._delivery(record, {}, ())
        self._slower[level - 1].offer(replace(delivery, first=0, done=done))
        return done

    def cancel(self, record_key: bytes) -> None:
        """Drop the waiting writes of a session, and wait until a running one has ended."""
        for tier in self._slower:
            tier.cancel(record_key)

    def catch_up(self, claims: Claims) -> None:
        """Queue again every session with which a slower tier is behind."""
        for level, tier in enumerate(self._slower, 1):
            for key in tier.take_behind():
                with claims.claim(key):
                    record = self._index.get(key)
                    if record is not None:
                        self.send(level, record)

    def _delivery(
        self, record: SessionRecord, fresh: Mapping[bytes, Blob], obsolete: Sequence[bytes]
    ) -> Delivery:
        key, blob = self._index.key(record), self._index.records.pack(record)
        chain = self._index.blob_keys(record)
        new = (i for i, key in enumerate(chain) if key in fresh)
        before = range(next(new, len(chain)) - 1, 0, -1)
        first = next((i for i in before if chain[i][:1] == CHUNK), 0)
        return Delivery(key, blob, chain, fresh, obsolete, record.tenant, first)
