"""Saves that wait for the codec: bounded in bytes, one per session, oldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from kvstore.blobs.chain import Tokens
from kvstore.blobs.snapshot import Snapshot
from kvstore.ledger.index import Claims
from kvstore.session import SessionRef
from kvstore.shapes import KVRun
from kvstore.store.records import SessionRecord

OnDone: TypeAlias = Callable[[SessionRecord | None], None]


@dataclass
class SaveJob:
    """One save. ``run`` and ``snapshots`` pin engine memory; they are released once encoded."""

    key: bytes  # of the session's record
    session: SessionRef
    tokens: Tokens
    run: KVRun
    snapshots: Sequence[Snapshot]
    nbytes: int  # hot bytes not saved before
    on_done: list[OnDone]
    lossy_tokens: int = 0  # no row from this token on was ever restored from a lossy copy
    lossy_state: int = 0  # position of the lossy copy that the states continue; 0 = none

    def release(self) -> None:
        self.run = ()
        self.snapshots = ()


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

    def offer(self, job: SaveJob) -> Offered:
        """Queue a save. A newer one replaces a waiting one and takes over its listeners."""
        with self._changed:
            older = self._waiting.get(job.key)
            rest = self._nbytes - (older.nbytes if older else 0)
            if self._closed or (rest and rest + job.nbytes > self._max_bytes):
                return Offered.REFUSED
            if older:
                job.on_done = [*older.on_done, *job.on_done]
                older.release()
            self._waiting[job.key] = job
            self._nbytes = rest + job.nbytes
            self._changed.notify_all()
            return Offered.SUPERSEDED if older else Offered.QUEUED

    def take(self, timeout_s: float) -> SaveJob | None:
        """Take and claim the oldest job of a session that is not claimed. None: none is ready."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready() or self._closed, timeout_s)
            key = self._ready()
            if key is None or not self._claims.take(key):
                return None
            self._num_running += 1
            return self._waiting.pop(key)

    def is_pressed(self, job: SaveJob) -> bool:
        """True if so many bytes wait besides this job that only the fastest way is affordable."""
        return self._nbytes - job.nbytes > self._max_bytes // 2

    def encoded(self, job: SaveJob) -> None:
        """Release the hot bytes of a job, which needs them no longer."""
        job.release()
        with self._changed:
            self._nbytes -= job.nbytes
            job.nbytes = 0

    def finish(self, job: SaveJob) -> None:
        """End a job that is done or has failed."""
        job.release()
        with self._changed:
            self._nbytes -= job.nbytes
            self._num_running -= 1
            self._claims.release(job.key)

    def drop(self, key: bytes) -> SaveJob | None:
        """Remove the waiting save of this session and return it, if there is one."""
        with self._changed:
            dropped = self._waiting.pop(key, None)
            self._nbytes -= dropped.nbytes if dropped else 0
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
        """Wait until no save waits or runs; False if that took too long."""
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
            return dropped

    @property
    def closed(self) -> bool:
        return self._closed

    def _ready(self) -> bytes | None:
        return next((key for key in self._waiting if not self._claims.is_claimed(key)), None)
