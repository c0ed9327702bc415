"""Saves that wait for the codec: bounded in bytes, one per session, oldest first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from kvstore.chain import Tokens
from kvstore.records import SessionRecord, SessionRef
from kvstore.shapes import KVRun
from kvstore.snapshot import Snapshot

OnDone: TypeAlias = Callable[[SessionRecord | None], None]


@dataclass
class SaveJob:
    """One save. ``run`` and ``snapshots`` pin engine memory and go as soon as they are encoded."""

    key: bytes  # of the session's record
    session: SessionRef
    tokens: Tokens
    run: KVRun
    snapshots: Sequence[Snapshot]
    nbytes: int  # hot bytes not saved before
    on_done: list[OnDone]
    lossy_tokens: int = 0  # behind so many, no row was ever restored from a lossy copy

    def release(self) -> None:
        self.run = ()
        self.snapshots = ()


class Offered(Enum):
    QUEUED = auto()
    SUPERSEDED = auto()  # queued in place of an older save of the session
    REFUSED = auto()


class SaveQueue:
    """Thread-safe. A session's saves and claims exclude each other."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._waiting: OrderedDict[bytes, SaveJob] = OrderedDict()
        self._busy: set[bytes] = set()  # being saved, or claimed
        self._nbytes = 0  # waiting and being saved
        self._closed = False

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def offer(self, job: SaveJob) -> Offered:
        """A newer save takes the place of a waiting one, and over its listeners."""
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
        """The oldest job of a session that is not busy, which it then is. None: nothing to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready() or self._closed, timeout_s)
            key = self._ready()
            if key is None:
                return None
            self._busy.add(key)
            return self._waiting.pop(key)

    def is_pressed(self, job: SaveJob) -> bool:
        """So much waits besides this job that there is no time to take trouble over it."""
        return self._nbytes - job.nbytes > self._max_bytes // 2

    def encoded(self, job: SaveJob) -> None:
        """The job needs no hot bytes any more."""
        job.release()
        with self._changed:
            self._nbytes -= job.nbytes
            job.nbytes = 0

    def finish(self, job: SaveJob) -> None:
        job.release()
        with self._changed:
            self._nbytes -= job.nbytes
            self._busy.discard(job.key)
            self._changed.notify_all()

    @contextmanager
    def claim(self, key: bytes, *, drop_waiting: bool = False) -> Iterator[SaveJob | None]:
        """Keep saves of this session from starting; waits for one that runs.

        Yields the waiting save that was taken out, if that was asked for and there was one.
        """
        with self._changed:
            dropped = self._waiting.pop(key, None) if drop_waiting else None
            self._nbytes -= dropped.nbytes if dropped else 0
            self._changed.wait_for(lambda: key not in self._busy)
            self._busy.add(key)
        try:
            yield dropped
        finally:
            with self._changed:
                self._busy.discard(key)
                self._changed.notify_all()

    def settled(self, key: bytes) -> bool:
        with self._changed:
            return key not in self._waiting and key not in self._busy

    def wait_settled(self, key: bytes, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: key not in self._waiting and key not in self._busy, timeout_s
            )

    def wait_idle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self) -> list[SaveJob]:
        """Refuses everything from now on; the jobs that will not be done."""
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
        return next((key for key in self._waiting if key not in self._busy), None)
