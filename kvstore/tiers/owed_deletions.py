"""Deletions that a tier was unavailable for: tried again later, and by the next life of the engine.

Without the file, a deletion that waits for Redis would end with the process, and the next life
would list the session again. One line of JSON for each deletion; lines that cannot be read are
ignored.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

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
    def is_record(self) -> bool:
        """True if the session's record is what is to be deleted."""
        return self.keys == [self.record_key]


class OwedDeletions:
    """The deletions that one tier still owes, oldest first. Not thread-safe.

    Args:
        path: the file in which they outlive the process; None = they end with it.

    Attributes:
        inherited: those of earlier lives, which know nothing of what was saved since.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._owed: deque[Owed] = deque()
        self._num_keys = 0
        self.inherited: list[Owed] = _read(path) if path else []

    def __len__(self) -> int:
        return len(self._owed) + len(self.inherited)

    def add(self, owed: Owed) -> None:
        """Remember a deletion."""
        self._owed.append(owed)
        self._num_keys += len(owed.keys)
        while self._num_keys > MAX_KEYS and len(self._owed) > 1:
            self._num_keys -= len(self._owed.popleft().keys)
        self._write([owed], append=True)

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

    def settle(self) -> None:
        """Write down which are owed now."""
        self._write([*self.inherited, *self._owed], append=False)

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


def _encoded(owed: Owed) -> bytes:
    keys = [x.hex() for x in owed.keys]
    return msgspec.json.encode([owed.at_s, owed.record_key.hex(), keys])


def _read(path: Path) -> list[Owed]:
    found: list[Owed] = []
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            lines = file.read().splitlines()
        for line in lines:
            with contextlib.suppress(ValueError):  # also msgspec's errors
                at_s, record, keys = msgspec.json.decode(line, type=tuple[float, str, list[str]])
                key = bytes.fromhex(record)
                found.append(Owed(at_s, key, [bytes.fromhex(x) for x in keys]))
    return found
