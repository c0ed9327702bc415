"""Deletes blobs from every tier, and repeats the deletion in a tier that was unavailable.

Pending deletions are kept in a file. Otherwise a deletion that waits for Redis would be lost when
the process ends, and the next process would list the session again. The file has one line of JSON
for each pending deletion; lines that cannot be read are ignored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from kvstore.ledger.index import SessionIndex
from kvstore.ledger.stack import TierStack

MAX_KEYS: Final = 65_536  # in all pending deletions of a tier; beyond it the oldest are dropped

_log = logging.getLogger(__name__)


class Owed(msgspec.Struct, frozen=True):
    """One pending deletion: keys of one session, and when the deletion was requested.

    ``at_s``: wall-clock seconds, comparable with ``SessionRecord.last_used_s`` and not before it.
    """

    at_s: float
    record_key: bytes
    keys: list[bytes]

    @property
    def blob_keys(self) -> list[bytes]:
        """The keys without the record's key: the session may exist again under that key."""
        return [x for x in self.keys if x != self.record_key]


class OwedDeletions:
    """The pending deletions of one tier, oldest first. Not thread-safe.

    Args:
        path: the file that keeps them for the next process; None = they are lost with this one.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._owed = deque[Owed]()
        self._num_keys = 0
        for owed in _read(path) if path else ():
            self._append(owed)

    def __len__(self) -> int:
        return len(self._owed)

    def __iter__(self) -> Iterator[Owed]:
        return iter(self._owed)

    def add(self, owed: Owed) -> list[Owed]:
        """Remember a deletion; return older ones that are dropped to stay within ``MAX_KEYS``."""
        dropped = self._append(owed)
        self._write([owed], append=True)
        return dropped

    def _append(self, owed: Owed) -> list[Owed]:
        dropped: list[Owed] = []
        self._owed.append(owed)
        self._num_keys += len(owed.keys)
        while self._num_keys > MAX_KEYS and len(self._owed) > 1:
            dropped.append(self._owed.popleft())
            self._num_keys -= len(dropped[-1].keys)
        return dropped

    def remove(self, done: Sequence[Owed]) -> None:
        """Remove deletions that have been done."""
        if done:
            numbers = {*map(id, done)}
            self._owed = deque(x for x in self._owed if id(x) not in numbers)
            self._num_keys = sum(len(x.keys) for x in self._owed)
            self._write(self._owed, append=False)

    def _write(self, owed: Iterable[Owed], *, append: bool) -> None:
        if self._path is None:
            return
        # The newline comes first, so that a line that a crash left unfinished ends here.
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
            _log.warning("pending deletions may be lost when this process ends: %s", error)


_Line: TypeAlias = tuple[float, str, list[str]]


def _encoded(owed: Owed) -> bytes:
    keys = [x.hex() for x in owed.keys]
    return msgspec.json.encode([owed.at_s, owed.record_key.hex(), keys])


def _read(path: Path) -> Iterator[Owed]:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # also msgspec's errors
                    at_s, record, names = msgspec.json.decode(line, type=_Line)
                    yield Owed(at_s, bytes.fromhex(record), [bytes.fromhex(x) for x in names])


class Deletions:
    """Deletes blobs from every tier, from an unavailable one once it answers. Thread-safe."""

    def __init__(self, stack: TierStack, index: SessionIndex, clock: Callable[[], float]) -> None:
        self._stack = stack
        self._index = index
        self._clock = clock
        self._owed = [OwedDeletions(stack.owed_file(level)) for level in range(len(stack))]
        index.forgotten |= self._forgotten()
        for level, owed in enumerate(self._owed):
            for x in owed:
                stack.hide(level, x.blob_keys)
        self._lock = threading.Lock()
        self._retrying = threading.Lock()

    def everywhere(self, record_key: bytes, keys: Iterable[bytes], last_used_s: float) -> None:
        """Delete these keys, which are of the session of ``record_key``, from every tier.

        Args:
            last_used_s: of the newest copy of the record; later than now if the clock was set back.
        """
        owed = Owed(max(self._clock(), last_used_s), record_key, list(keys))
        for level in range(len(self._stack)):
            if not self._stack.delete(level, owed.keys):
                with self._lock:
                    self._stack.hide(level, owed.blob_keys)
                    for dropped in self._owed[level].add(owed):
                        self._stack.show(level, dropped.keys)
                    self._index.forgotten[record_key] = owed.at_s

    def retry(self) -> None:
        """Try each pending deletion again; one that fails stays pending.

        Blobs that a session needs by now, and the records of sessions that exist again, are not
        deleted.
        """
        with self._retrying:
            for level, owed in enumerate(self._owed):
                with self._lock:
                    waiting = list(owed)
                done = [x for x in waiting if self._is_done(level, x)]
                for x in done:
                    self._stack.show(level, x.keys)
                with self._lock:
                    owed.remove(done)
            with self._lock:
                self._index.forgotten = self._forgotten()

    def _forgotten(self) -> dict[bytes, float]:
        """Return when each session with a pending deletion was forgotten, by record key."""
        return {x.record_key: x.at_s for owed in self._owed for x in owed}

    def _is_done(self, level: int, owed: Owed) -> bool:
        """Carry out a pending deletion; return whether it need not be tried again.

        It is dropped if the tier has a newer record that this store does not know: another engine
        or another process has saved the session since, and may need any of these blobs.
        """
        if self._index.get(owed.record_key) is None:
            there = self._index.find_in(level, owed.record_key)
            if there is not None and there.last_used_s > owed.at_s:
                return True
        return self._stack.delete(level, self._unneeded(owed.keys))

    def _unneeded(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys of blobs that no session needs and of records that are not known."""
        return [x for x in self._index.unused(keys) if self._index.get(x) is None]
