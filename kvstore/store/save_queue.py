"""Queues the saves of sessions: bounded in bytes, one per session, oldest first."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol, TypeAlias

from kvstore.blobs.chain import Chain, Piece
from kvstore.ledger.index import Claims
from kvstore.ledger.record import SessionRecord
from kvstore.session import SessionRef
from kvstore.tiers.base import Blob

_log = logging.getLogger(__name__)

OnDone: TypeAlias = Callable[[SessionRecord | None], None]


class RowSource(Protocol):
    """The KV of one session at the end of a turn, as its engine holds it.

    The store calls ``pack`` once at most, on its saving thread, and ``release`` once at least.
    """

    def is_restored(self, piece: Piece) -> bool:
        """True if some of these rows, or this state, came from a lossy copy.

        Such a piece is never packed again: its error would grow with each sleep.
        """

    def pack(self, pieces: Sequence[Piece]) -> list[Blob]:
        """Pack these pieces; returns their blobs in this order. May release by itself."""

    def release(self) -> None:
        """Let go of the engine's memory: nothing reads it any more. A second call does nothing."""


@dataclass
class SaveJob:
    """The save of one session.

    Args:
        key: of the session's record.
        chain: all full chunks that the source has.
        states: the numbers of chunks after which the source has a state, ascending.
        nbytes: hot bytes that were not saved before.
        note: see ``SessionRecord``.
    """

    key: bytes
    session: SessionRef
    chain: Chain
    source: RowSource
    nbytes: int
    states: Sequence[int] = ()
    note: bytes = b""
    on_done: list[OnDone] = field(default_factory=list)

    def call_listeners(self, record: SessionRecord | None) -> None:
        """Call each listener. One that raises is logged, and the next one is called."""
        for on_done in self.on_done:
            try:
                on_done(record)
            except Exception:  # its own defect must not end the thread that calls it
                _log.exception("a listener of a finished save failed")


class Offered(Enum):
    QUEUED = auto()
    SUPERSEDED = auto()  # queued in place of an older save of the session
    REFUSED = auto()


class SaveQueue:
    """Thread-safe. A save that runs has claimed its session, so no other thread changes it."""

    def __init__(self, max_bytes: int, claims: Claims) -> None:
        self._max_bytes = max_bytes
        self._claims = claims
        self._changed = claims.changed
        self._waiting: OrderedDict[bytes, SaveJob] = OrderedDict()
        self._num_running = 0
        self._nbytes = 0  # waiting and being saved
        self._closed = False

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def offer(self, job: SaveJob, *, always: bool = False) -> Offered:
        """Queue a save. A newer one replaces a waiting one and takes over its listeners.

        ``always``: also if too many bytes wait.
        """
        with self._changed:
            older = self._waiting.get(job.key)
            rest = self._nbytes - (older.nbytes if older else 0)
            full = job.nbytes and rest and rest + job.nbytes > self._max_bytes
            if self._closed or (full and not always):
                return Offered.REFUSED
            if older:
                job.on_done = [*older.on_done, *job.on_done]
            self._waiting[job.key] = job
            self._nbytes = rest + job.nbytes
            self._changed.notify_all()
        if older is None:
            return Offered.QUEUED
        older.source.release()
        return Offered.SUPERSEDED

    def take(self, timeout_s: float) -> SaveJob | None:
        """Take and claim the oldest job of a session that is not claimed. None: none is ready."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready() or self._closed, timeout_s)
            key = self._ready()
            if key is None or not self._claims.take(key):
                return None
            self._num_running += 1
            return self._waiting.pop(key)

    def charge(self, job: SaveJob, nbytes: int) -> None:
        """Count so many bytes for a job that runs: some that were saved before may be gone."""
        with self._changed:
            self._nbytes += nbytes - job.nbytes
            job.nbytes = nbytes

    def packed(self, job: SaveJob) -> None:
        """Release the hot bytes of a job, which needs them no longer."""
        job.source.release()
        with self._changed:
            self._nbytes -= job.nbytes
            job.nbytes = 0

    def settle(self, job: SaveJob) -> None:
        """Release the session of a job that is done or has failed; its listeners come next."""
        self.packed(job)
        with self._changed:
            self._claims.release(job.key)

    def finish(self, job: SaveJob) -> None:
        """End a settled job whose listeners were called: only now it runs no longer."""
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def drop(self, key: bytes) -> SaveJob | None:
        """Remove the waiting save of this session and return it, if there is one."""
        with self._changed:
            dropped = self._waiting.pop(key, None)
            self._nbytes -= dropped.nbytes if dropped else 0
        if dropped is not None:
            dropped.source.release()
        return dropped

    def is_waiting(self, key: bytes) -> bool:
        """True if a save of this session waits."""
        with self._changed:
            return key in self._waiting

    def settled(self, key: bytes) -> bool:
        """True if no save of this session waits, and none is running."""
        with self._changed:
            return key not in self._waiting and not self._claims.is_claimed(key)

    def wait_settled(self, key: bytes, timeout_s: float) -> bool:
        """Wait until ``settled``; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self.settled(key), timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no save waits or runs and all ``on_done`` were called; False: time ran out."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._num_running, timeout_s
            )

    def close(self) -> list[SaveJob]:
        """Refuse every save from now on; return the waiting jobs, which will not be done."""
        with self._changed:
            self._closed = True
            dropped = list(self._waiting.values())
            self._waiting.clear()
            self._nbytes -= sum(x.nbytes for x in dropped)
            self._changed.notify_all()
        for job in dropped:
            job.source.release()
        return dropped

    @property
    def closed(self) -> bool:
        return self._closed

    def _ready(self) -> bytes | None:
        return next((key for key in self._waiting if not self._claims.is_claimed(key)), None)
