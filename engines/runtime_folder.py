"""The folder of one server's sockets and temporary files, removed by the last process that leaves.

A gateway makes it. The gateway and its engine hold a shared lock on a file in it for as long as
they live: a folder whose lock has no holder was left by processes that were killed, and the next
start removes it. Standard library only.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

log = logging.getLogger("thermocline.engines")

LOCK: Final = "alive"
SCRATCH: Final = "tmp"  # TMPDIR of the engine, made anew for each of its lives
DYING_S: Final = 30.0  # for the system to close what a killed gateway held, however busy it is


@contextmanager
def runtime_folder(base: Path, prefix: str = "") -> Iterator[Path]:
    """Make a folder (0700) in ``base``; it is removed at the end.

    Folders with the same prefix that killed processes of this user left there are removed first.

    Raises:
        OSError: it cannot be made.
    """
    remove_abandoned(base, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    try:
        with _locked(_new_lock(folder)):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(base: Path, prefix: str) -> None:
    """Remove the folders with this prefix that killed processes of this user left in ``base``."""
    for folder in base.glob(f"{prefix}*"):
        with suppress(OSError):  # it went meanwhile, or was not made by ``runtime_folder``
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                _remove_without_holder(folder)


@contextmanager
def held(folder: Path, gateway_died: Callable[[], bool]) -> Iterator[None]:
    """Keep the folder while an engine lives; the engine removes it if the gateway is gone by then.

    A folder that was not made by ``runtime_folder`` is left alone.

    Args:
        gateway_died: called at the end. The system closes a killed gateway's pipe to the engine
            before its lock, so after a death the engine waits for the lock up to ``DYING_S``.

    Raises:
        OSError: the folder is being removed.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        yield
        return
    with _locked(lock):
        try:
            yield
        finally:
            end = time.monotonic() + (DYING_S if gateway_died() else 0.0)
            while not _remove_unless_held(folder, lock) and time.monotonic() < end:
                time.sleep(0.01)


def fresh_scratch(folder: Path) -> Path:
    """Make an empty folder for temporary files in ``folder``; removes those of an earlier engine.

    Files that a killed engine was writing must not be loaded by the next one. Raises ``OSError``.
    """
    scratch = folder / SCRATCH
    with suppress(FileNotFoundError):
        shutil.rmtree(scratch)
    scratch.mkdir(mode=0o700, parents=True)
    return scratch


def _new_lock(folder: Path) -> int:
    """Make the lock file, and open it.

    It gets its name only once it is locked: otherwise another server's start could remove the
    folder as abandoned.
    """
    draft = folder / f".{LOCK}"
    lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        draft.rename(folder / LOCK)
    except OSError:
        os.close(lock)
        raise
    return lock


@contextmanager
def _locked(lock: int) -> Iterator[None]:
    """Hold a shared lock on an open file, and close the file at the end."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _remove_without_holder(folder: Path) -> None:
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if _remove_unless_held(folder, lock):
            log.info("removed %s, which a killed server had left", folder)
    finally:
        os.close(lock)


def _remove_unless_held(folder: Path, lock: int) -> bool:
    """Remove the folder if no other process holds its lock; returns whether it did."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True
