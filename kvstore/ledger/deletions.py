"""Deletions that a tier still has to do, since it was unavailable when they were ordered.

They are kept in a file: otherwise one that waits for Redis would end with the process, and the next
life would list the session again. It has one line of JSON for each; lines that cannot be read are
ignored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from kvstore.ledger.index import SessionIndex
from kvstore.ledger.stack import TierStack

MAX_KEYS: Final = 65_536  # of all deletions of a tier; the oldest deletion is dropped first

_log = logging.getLogger(__name__)


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
