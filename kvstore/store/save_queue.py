"""The queue of saves: bounded in bytes, at most one per session, oldest first."""

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

    The store calls ``pack`` at most once, on its saving thread, and ``release`` at least once.
    """

    def is_restored(self, piece: Piece) -> bool:
        """Return whether some rows of this piece, or this state, came from a lossy copy.

        Such a piece is never packed again, since its error would grow with each sleep.
        """

    def pack(self, pieces: Sequence[Piece]) -> list[Blob]:
        """Return the blobs of these pieces, in this order. May release the memory itself."""

    def release(self) -> None:
        """Release the engine's memory, which is not read any more. A second call does nothing."""


@dataclass
class SaveJob:
    """The save of one session.

    Args:
        key: the key of the session's record.
        chain: the names of all full chunks that the source has.
        nbytes: hot bytes that were not saved before, as the queue counts them.
        states: the numbers of chunks after which the source has a state, ascending.
        note: see ``SessionRecord``.
        on_done: the listeners, of this save and of older ones that it replaced.
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
        """Call each listener; an exception is logged, and the next listener is called."""
        for on_done in self.on_done:
            try:
                on_done(record)
            except Exception:  # a defect in the listener must not end the saving thread
                _log.exception("a listener of a finished save failed")


class Offered(Enum):
    QUEUED = auto()
    SUPERSEDED = auto()  # queued in place of an older save of the session
    REFUSED = auto()


class SaveQueue:
    """The waiting saves of a store. Thread-safe.

    A session is claimed while its save runs, so no other thread changes it.
    """

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
        """Queue a save. It replaces a waiting save of the session and takes over its listeners.

        Args:
            always: queue it even if too many bytes wait.
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
        """Return the oldest job whose session is not claimed, and claim it; None if none comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready() or self._closed, timeout_s)
            key = self._ready()
            if key is None or not self._claims.take(key):
                return None
            self._num_running += 1
            return self._waiting.pop(key)

    def charge(self, job: SaveJob, nbytes: int) -> None:
        """Set the bytes of a running job; more than before if blobs saved earlier are gone."""
        with self._changed:
            self._nbytes += nbytes - job.nbytes
            job.nbytes = nbytes

    def packed(self, job: SaveJob) -> None:
        """Release the hot bytes of a job whose pieces are packed."""
        job.source.release()
        with self._changed:
            self._nbytes -= job.nbytes
            job.nbytes = 0

    def settle(self, job: SaveJob) -> None:
        """End the claim of a job that is done or has failed; its listeners are called next."""
        self.packed(job)
        with self._changed:
            self._claims.release(job.key)

    def finish(self, job: SaveJob) -> None:
        """Stop counting a settled job as running, once its listeners were called."""
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def drop(self, key: bytes) -> SaveJob | None:
        """Remove and return the waiting save of this session; None if there is none."""
        with self._changed:
            dropped = self._waiting.pop(key, None)
            self._nbytes -= dropped.nbytes if dropped else 0
        if dropped is not None:
            dropped.source.release()
        return dropped

    def is_waiting(self, key: bytes) -> bool:
        """Return whether a save of this session is waiting."""
        with self._changed:
            return key in self._waiting

    def settled(self, key: bytes) -> bool:
        """Return whether no save of this session is waiting or running."""
        with self._changed:
            return key not in self._waiting and not self._claims.is_claimed(key)

    def wait_settled(self, key: bytes, timeout_s: float) -> bool:
        """Wait until the session is ``settled``; return False if time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: self.settled(key), timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all saves are done and each ``on_done`` was called; False if time ran out."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._num_running, timeout_s
            )

    def close(self) -> list[SaveJob]:
        """Refuse every save from now on; return the waiting jobs, which are dropped."""
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
