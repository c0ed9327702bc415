"""A name that a server keeps over its lives, and that no other server goes by meanwhile."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
from pathlib import Path
from typing import Final

_NAME_BYTES: Final = 16
_NAME: Final = re.compile(rb"[0-9a-f]{%d}" % _NAME_BYTES)
_log = logging.getLogger(__name__)


class KeptName:
    """A name that no other engine has until ``release``."""

    def __init__(self, folder: Path, file_name: str) -> None:
        self._fd = -1
        self.text = secrets.token_hex(_NAME_BYTES // 2)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = _held(folder / file_name)
            self.text = _kept(self._fd, self.text)
        except OSError as error:
            self.release()
            _log.warning(
                "this server goes by a new name in this life: %s cannot be used: %s",
                folder / file_name,
                error.strerror or error,
            )

    def release(self) -> None:
        """Let another engine use this name. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _held(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _kept(fd: int, new: str) -> str:
    """Return the name in the file; write ``new`` if there is none."""
    found = os.pread(fd, _NAME_BYTES + 1, 0)
    if _NAME.fullmatch(found):
        return found.decode("ascii")
    os.ftruncate(fd, 0)
    os.pwrite(fd, new.encode("ascii"), 0)
    return new
