"""Moves, pins and forgets sessions between their turns, and drops expired ones.

Deletions that a tier was unavailable for lie in a file: otherwise one that waits for Redis would
end with the process, and the next life would list the session again. It has one line of JSON for
each; lines that cannot be read are ignored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from kvstore.ledger.index import Claims, SessionIndex
from kvstore.ledger.notices import Notices, StoreNotice
from kvstore.ledger.record import SessionRecord
from kvstore.ledger.stack import TierStack
from kvstore.ledger.writing import Committer, Pins
from kvstore.session import SessionRef, TierName
from kvstore.workers import Workers

MAX_KEYS: Final = 65_536  # of all deletions of a tier; the oldest deletion is dropped first

_log = logging.getLogger(__name__)
WAIT_S: Final = 30.0  # for running writes of the session


class Owed(msgspec.Struct, frozen=True):
    """The keys of one deletion, all of one session, and when its user asked for it.

    ``at_s``: seconds of the wall clock, as the times in records.
    """

    at_s: float
    record_key: bytes
    keys: list[bytes]

    @property
    def blob_keys(self) -> list[bytes]:
        """The keys without the record's, which may be of a later life of the session."""
        return [x for x in self.keys if x != self.record_key]


class OwedDeletions:
    """The deletions that one tier still owes, oldest first. Not thread-safe.

    Args:
        path: the file in which they outlive the process; None = they end with it.

    Attributes:
        inherited: those of earlier lives, which know no later saves.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._owed: deque[Owed] = deque()
        self._num_keys = 0
        self.inherited: list[Owed] = _read(path) if path else []

    def __len__(self) -> int:
        return len(self._owed) + len(self.inherited)

    def add(self, owed: Owed) -> list[Owed]:
        """Remember a deletion; return those that are given up for it."""
        dropped: list[Owed] = []
        self._owed.append(owed)
        self._num_keys += len(owed.keys)
        while self._num_keys > MAX_KEYS and len(self._owed) > 1:
            dropped.append(self._owed.popleft())
            self._num_keys -= len(dropped[-1].keys)
        self._write([owed], append=True)
        return dropped

    def take(self) -> list[Owed]:
        """Take those of this life; the file keeps them until ``settle``."""
        taken = list(self._owed)
        self._owed.clear()
        self._num_keys = 0
        return taken

    def put_back(self, owed: Sequence[Owed]) -> None:
        """Return what was taken and could not be done, as the oldest."""
        self._owed.extendleft(reversed(owed))
        self._num_keys += sum(len(x.keys) for x in owed)

    def all(self) -> list[Owed]:
        """Return what earlier lives and this one owe."""
        return [*self.inherited, *self._owed]

    def settle(self) -> None:
        """Write down which are owed now."""
        self._write(self.all(), append=False)

    def _write(self, owed: Sequence[Owed], *, append: bool) -> None:
        if self._path is None:
            return
        # A line that an earlier process left unfinished ends before the first one.
        lines = b"".join(b"\n" + _encoded(x) for x in owed)
        path = self._path if append else self._path.with_name(self._path.name + ".new")
        mode = os.O_APPEND if append else os.O_TRUNC
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | mode, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(lines)
            if not append:
                path.replace(self._path)
        except OSError as error:
            _log.warning("deletions that wait for a tier may end with this process: %s", error)


_Line: TypeAlias = tuple[float, str, list[str]]


def _encoded(owed: Owed) -> bytes:
    keys = [x.hex() for x in owed.keys]
    return msgspec.json.encode([owed.at_s, owed.record_key.hex(), keys])


def _read(path: Path) -> list[Owed]:
    found: deque[Owed] = deque()
    num_keys = 0
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # also msgspec's errors
                    at_s, record, names = msgspec.json.decode(line, type=_Line)
                    keys = [bytes.fromhex(x) for x in names]
                    found.append(Owed(at_s, bytes.fromhex(record), keys))
                    num_keys += len(keys)
                while num_keys > MAX_KEYS and len(found) > 1:
                    num_keys -= len(found.popleft().keys)
    return list(found)


class Upkeep:
    """Thread-safe. Every verb may wait for a commit of the session, or for a tier.

    Args:
        is_awaited: returns for a record key whether a save of that session is waiting.
    """

    def __init__(
        self,
        stack: TierStack,
        index: SessionIndex,
        committer: Committer,
        pins: Pins,
        claims: Claims,
        workers: Workers,
        notices: Notices,
        is_awaited: Callable[[bytes], bool],
    ) -> None:
        self._stack = stack
        self._index = index
        self._committer = committer
        self._pins = pins
        self._claims = claims
        self._workers = workers
        self._notices = notices
        self._is_awaited = is_awaited
        self.deletions = Deletions(stack, index, index.clock)

    def tier_of(self, record: SessionRecord) -> TierName | None:
        """Return the slowest tier that a restore must read; None if even the beginning is gone."""
        located = self._stack.locate(self._index.records.needed_keys(record))
        levels = [x for x in located.levels[: located.num_leading] if x is not None]
        return self._stack.name(max(levels)) if levels else None

    def resting_here(self) -> list[SessionRecord]:
        """Sessions that can be restored here, without those whose record no tier has any more."""
        usable = self._index.usable()
        located = self._stack.locate([self._index.key(x) for x in usable])
        held = zip(usable, located.levels, strict=True)
        return [x for x, level in held if level is not None or located.down]

    def demote(self, session: SessionRef, tier: TierName) -> TierName | None:
        """Bring the session to ``tier``, then drop the faster copies; returns its tier then.

        None if the session is not known. A pinned session, and one that ``tier`` cannot take as a
        whole, stays where it is.
        """
        level = self._stack.level(tier)
        with self._claims.claim(self._index.key_of(session)):  # else an older record could be sent
            record = self._index.find_anywhere(session)
            if record is None:
                return None
            sent = None
            if level and not record.pinned:
                sent = self._committer.send(level, record)
        if level and sent is not None and _is_taken(sent):
            self._drop_above(level, record)
        return self.tier_of(record)

    def _drop_above(self, level: int, record: SessionRecord) -> None:
        key, blob_keys = self._index.key(record), self._index.blob_keys(record)
        with self._claims.claim(key):
            now = self._index.get(key)
            if now is None or now.pinned or self._index.blob_keys(now) != blob_keys:
                return  # forgotten, pinned or saved again meanwhile
            own = [key, *self._index.unshared(blob_keys, key)]
            for faster in range(level):
                self._stack.delete(faster, own)

    def pin(self, session: SessionRef, pinned: bool) -> None:
        """Evict the session's blobs last, or stop that; a session never saved stays as it is."""
        with self._claims.claim(self._index.key_of(session)):
            record = self._index.find_anywhere(session)
            if record is None or record.pinned == pinned:
                return
            self._committer.rewrite(msgspec.structs.replace(record, pinned=pinned))

    def forget(self, session: SessionRef) -> bool:
        """Remove every blob of the session that no other session here uses.

        False if the session was not known.
        """
        key = self._index.key_of(session)
        with self._claims.claim(key):
            return self._remove(key)

    def expire(self) -> None:
        """Forget expired sessions, report evicted ones, retry pending deletions."""
        for record in self._index.all():
            if self._index.is_over(record):
                self._let_lapse(self._index.key(record))
        self._notices.look()
        self.deletions.retry()

    def _let_lapse(self, key: bytes) -> None:
        with self._claims.claim(key):
            record = self._index.get(key)
            # The session may have been used since the check, and the save of that turn may wait.
            if record is None or not self._index.is_over(record) or self._is_awaited(key):
                return
            self._remove(key)
            self._index.note(key, "ttl")
        self._notices.report(StoreNotice(SessionRef(record.tenant, record.id, b""), "expired"))

    def _remove(self, key: bytes) -> bool:
        """Remove a claimed session."""
        self._committer.cancel(key)
        copies = self._index.everywhere(key)
        self._index.remove(key)
        self._workers.quiet(WAIT_S)  # blobs on their way to a faster tier
        self._pins.release(key)
        doomed = sorted({x for copy in copies for x in self._index.owned(copy)})
        # A reader may have found the record again meanwhile, since it is deleted last, so that an
        # interrupted caller can begin again. So the session itself does not count as a user.
        for keys in (self._index.unshared(doomed, key), [key]):
            self.deletions.everywhere(key, keys)
        self._index.remove(key)
        return bool(copies)


def _is_taken(sent: Future[bool]) -> bool:
    """Wait until a tier has all of a session; False if the tier failed, or took too long."""
    try:
        return sent.result(timeout=WAIT_S)
    except TimeoutError:
        return False


class Deletions:
    """Removes blobs from every tier, later also from one that is down now. Thread-safe."""

    def __init__(self, stack: TierStack, index: SessionIndex, clock: Callable[[], float]) -> None:
        self._stack = stack
        self._index = index
        self._clock = clock
        self._owed = [OwedDeletions(stack.owed_file(level)) for level in range(len(stack))]
        index.forgotten |= {x.record_key: x.at_s for owed in self._owed for x in owed.inherited}
        for level, owed in enumerate(self._owed):
            for x in owed.inherited:
                stack.hide(level, x.blob_keys)
        self._lock = threading.Lock()
        self._retrying = threading.Lock()

    def everywhere(self, record_key: bytes, keys: Iterable[bytes]) -> None:
        """Delete some blobs of the session of ``record_key``, or its record."""
        owed = Owed(self._clock(), record_key, list(keys))
        for level in range(len(self._stack)):
            if not self._stack.delete(level, owed.keys):
                with self._lock:
                    self._stack.hide(level, owed.blob_keys)
                    for dropped in self._owed[level].add(owed):
                        self._stack.show(level, dropped.keys)
                    self._index.forgotten[record_key] = owed.at_s

    def retry(self) -> None:
        """Try each pending deletion once more; one that fails again stays pending.

        Blobs that a session needs by now, and records of sessions that exist again, are kept.
        """
        with self._retrying:
            for level, owed in enumerate(self._owed):
                if len(owed):
                    self._retry_inherited(level, owed)
                    self._retry_own(level, owed)
            with self._lock:
                self._index.forgotten = {
                    x.record_key: x.at_s for owed in self._owed for x in owed.all()
                }

    def _retry_inherited(self, level: int, owed: OwedDeletions) -> None:
        """Retry those of earlier lives, which know no later saves.

        A deletion is dropped as a whole if the session was saved again since, here or by another
        engine.
        """
        left = []
        for x in owed.inherited:
            key = x.record_key
            newest = self._index.get(key) or self._index.find_in(level, key)
            again = newest is not None and newest.last_used_s > x.at_s
            if again or self._stack.delete(level, self._still(x.keys)):
                self._stack.show(level, x.keys)
            else:
                left.append(x)
        if len(left) < len(owed.inherited):
            with self._lock:
                owed.inherited = left
                owed.settle()

    def _retry_own(self, level: int, owed: OwedDeletions) -> None:
        with self._lock:
            taken = owed.take()
        done = 0
        while done < len(taken) and self._stack.delete(level, self._still(taken[done].keys)):
            self._stack.show(level, taken[done].keys)
            done += 1
        with self._lock:
            owed.put_back(taken[done:])
            if done:
                owed.settle()

    def _still(self, keys: Sequence[bytes]) -> list[bytes]:
        return [x for x in self._index.unused(keys) if self._index.get(x) is None]
