"""Bringing a session to a tier: chunks first, the record last.

``deliver`` does it for one tier, now. ``WriteBehind`` does it for a slower tier on a thread of its
own, behind a bounded queue. A delivery that was skipped or cut short leaves the tier with what it
had: an older record that is still true, and perhaps some chunks more. It is remembered as *behind*
and made good by the next save, a demotion or a flush: what is missing is then read from the faster
tiers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.stats import Counters
from kvstore.tier_stack import TierStack
from kvstore.tiers.base import Blob

WRITE_BATCH: Final = 16  # blobs per call to a tier
# A tier that is down for days would else be owed every session there ever was. Of the one longest
# behind it is forgotten; its next save brings all that is missing, as any save does.
MAX_BEHIND: Final = 65_536

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivery:
    """One session as of one save.

    ``chain``: every blob the record needs, in order. ``fresh``: those that this save made, still
    in memory. ``obsolete``: what the older record needed and nobody does now.
    """

    record_key: bytes
    record: Blob
    chain: Sequence[bytes]
    fresh: Mapping[bytes, Blob] = field(default_factory=dict)
    obsolete: Sequence[bytes] = ()
    done: Future[bool] = field(default_factory=Future)

    @property
    def nbytes(self) -> int:
        """Packed bytes that wait in memory."""
        return len(self.record) + sum(map(len, self.fresh.values()))


class Delivered(NamedTuple):
    recorded: bool  # the tier's record is now the new one
    complete: bool  # and nothing that it needs is lacking


def deliver(stack: TierStack, place: int, delivery: Delivery, *, whole: bool) -> Delivered:
    """Make one tier hold the session. A tier that could not take all of it keeps an older record.

    Args:
        whole: also fetch what the tier lacks of older saves from the faster tiers. Without it only
            the fresh blobs are written.
    """
    wanted = delivery.chain if whole else [x for x in delivery.chain if x in delivery.fresh]
    held = stack.holds(place, wanted)
    missing = [key for key, there in zip(wanted, held, strict=True) if not there]
    complete = _write(stack, place, delivery, missing)
    # Part of a session is better than none, but not than an older one that is whole.
    if not complete and stack.may_hold(place, delivery.record_key):
        return Delivered(False, False)
    if not stack.replace(place, delivery.record_key, delivery.record):
        return Delivered(False, False)
    stack.touch_in(place, [delivery.record_key, *delivery.chain])
    return Delivered(True, stack.delete(place, delivery.obsolete) and complete)


def _write(stack: TierStack, place: int, delivery: Delivery, missing: Sequence[bytes]) -> bool:
    """Put what is missing, as far as somebody has it; True if that was all."""
    # Pinned meanwhile, so that the end of a long session never makes room by evicting its head.
    with stack.pinned_in(place, delivery.chain):
        done = [
            _write_batch(stack, place, delivery.fresh, missing[i : i + WRITE_BATCH])
            for i in range(0, len(missing), WRITE_BATCH)
        ]
    return all(done)


def _write_batch(
    stack: TierStack, place: int, fresh: Mapping[bytes, Blob], keys: Sequence[bytes]
) -> bool:
    blobs = {key: fresh[key] for key in keys if key in fresh}
    for faster in range(place):
        rest = [key for key in keys if key not in blobs]
        found = stack.find(faster, rest) if rest else []
        blobs |= {key: x for key, x in zip(rest, found, strict=True) if x is not None}
    items = [(key, blobs[key]) for key in keys if key in blobs]
    return stack.put(place, items) and len(items) == len(keys)


class WriteBehind:
    """The queue and the thread of one slower tier."""

    def __init__(
        self,
        stack: TierStack,
        place: int,
        max_bytes: int,
        counters: Counters,
        *,
        max_behind: int = MAX_BEHIND,
    ) -> None:
        self._stack = stack
        self._place = place
        self._max_bytes = max_bytes
        self._max_behind = max_behind
        self._counters = counters
        self._changed = threading.Condition()
        self._waiting: deque[Delivery] = deque()
        self._nbytes = 0  # waiting and being written
        self._current: bytes | None = None
        self._behind: dict[bytes, None] = {}  # longest behind first
        self._closed = False
        name = f"kvstore-write-{stack.name(place)}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def offer(self, delivery: Delivery) -> None:
        """Never waits. ``delivery.done`` tells whether the tier took all of it."""
        with self._changed:
            full = self._nbytes and self._nbytes + delivery.nbytes > self._max_bytes
            if not full and not self._closed:
                self._waiting.append(delivery)
                self._nbytes += delivery.nbytes
                self._changed.notify_all()
                return
        self._settle(delivery, False)

    def take_behind(self) -> set[bytes]:
        """Record keys of sessions whose newest save is not here; whoever asks makes it good."""
        with self._changed:
            behind, self._behind = self._behind, {}
            return set(behind)

    def cancel(self, record_key: bytes) -> None:
        """Forget what waits for this session; returns when none of it is being written."""
        with self._changed:
            dropped = [x for x in self._waiting if x.record_key == record_key]
            self._waiting = deque(x for x in self._waiting if x.record_key != record_key)
            self._nbytes -= sum(x.nbytes for x in dropped)
            self._behind.pop(record_key, None)
            self._changed.wait_for(lambda: self._current != record_key)
        for delivery in dropped:
            delivery.done.set_result(False)

    def wait_idle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and self._current is None, timeout_s
            )

    def close(self) -> None:
        """What still waits is dropped."""
        with self._changed:
            self._closed = True
            dropped, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for delivery in dropped:
            delivery.done.set_result(False)
        self._thread.join()

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """False once closed. By itself, so that nothing holds blobs while the next is awaited."""
        delivery = self._next()
        if delivery is None:
            return False
        self._settle(delivery, self._delivered(delivery))
        with self._changed:
            self._nbytes -= delivery.nbytes
            self._current = None
            self._changed.notify_all()
        return True

    def _delivered(self, delivery: Delivery) -> bool:
        try:
            return deliver(self._stack, self._place, delivery, whole=True).complete
        except Exception:  # the edge of this thread: a defect in a tier must not end it
            _log.exception("writing to %s failed", self._stack.name(self._place))
            return False

    def _next(self) -> Delivery | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            delivery = self._waiting.popleft()
            self._current = delivery.record_key
            return delivery

    def _settle(self, delivery: Delivery, complete: bool) -> None:
        if not complete:
            self._counters.add(f"behind.{self._stack.name(self._place)}")
        with self._changed:
            self._behind.pop(delivery.record_key, None)
            if not complete:
                self._behind[delivery.record_key] = None
            if len(self._behind) > self._max_behind:
                del self._behind[next(iter(self._behind))]
        delivery.done.set_result(complete)
