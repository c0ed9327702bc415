"""Deletions that a tier was unavailable for: tried again later, and by the next life of the engine.

Without the file, a deletion that waits for Redis would end with the process, and the next life
would list the session again. One line of JSON for each deletion holds its keys in hex; lines that
cannot be read are ignored.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

MAX_OWED: Final = 1024

_log = logging.getLogger(__name__)


class OwedDeletions:
    """The deletions that one tier still owes, oldest first. Not thread-safe.

    Args:
        path: the file in which they outlive the process; None = they end with it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._owed: deque[Sequence[bytes]] = deque(_read(path) if path else (), MAX_OWED)

    def __len__(self) -> int:
        return len(self._owed)

    def add(self, keys: Sequence[bytes]) -> None:
        """Remember the keys of one deletion; the oldest is dropped if there are too many."""
        self._owed.append(keys)
        self._write([keys], os.O_APPEND)

    def take(self) -> list[Sequence[bytes]]:
        """Take all of them; the file keeps them until ``settle``."""
        taken = list(self._owed)
        self._owed.clear()
        return taken

    def settle(self) -> None:
        """Write down which are owed now."""
        self._write(self._owed, os.O_TRUNC)

    def _write(self, owed: Iterable[Sequence[bytes]], mode: int) -> None:
        if self._path is None:
            return
        lines = [msgspec.json.encode([x.hex() for x in keys]) + b"\n" for keys in owed]
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | mode, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(b"".join(lines))
        except OSError as error:
            _log.warning("deletions that wait for a tier end with this process: %s", error)
            self._path = None


def _read(path: Path) -> list[list[bytes]]:
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # also of msgspec
                found.append([bytes.fromhex(x) for x in msgspec.json.decode(line, type=list[str])])
    return found
