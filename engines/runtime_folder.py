"""The folder of one server's sockets and temporary files; the last process that exits removes it.

The gateway makes the folder. The gateway and its engine hold a shared lock on a file in it for as
long as they live. If no process holds the lock, the folder was left by processes that were killed,
and the next start removes it. Standard library only.
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
SCRATCH: Final = "tmp"  # TMPDIR of the engine, made anew at each of its starts
DYING_S: Final = 30.0  # time for a busy system to release the lock of a killed gateway


@contextmanager
def runtime_folder(base: Path, prefix: str = "") -> Iterator[Path]:
    """Make a folder (mode 0700) in ``base`` for the time of the context.

    Folders with the same prefix that killed processes of this user left there are removed first.

    Raises:
        OSError: the folder cannot be made.
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
        with suppress(OSError):  # another process removed it, or ``runtime_folder`` did not make it
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                _remove_without_holder(folder)


@contextmanager
def held(folder: Path, gateway_died: Callable[[], bool]) -> Iterator[None]:
    """Hold the folder's lock while an engine lives; at the end, remove the folder if unused.

    The folder stays if the gateway still holds its lock, or if ``runtime_folder`` did not make it.

    Args:
        gateway_died: called at the end. The system closes a killed gateway's pipe to the engine
            before it releases the gateway's lock, so the engine then waits up to ``DYING_S``.

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
    """Make an empty subfolder for temporary files, and remove those of an earlier engine.

    The next engine must not load files that a killed engine was writing. Raises ``OSError``.
    """
    scratch = folder / SCRATCH
    with suppress(FileNotFoundError):
        shutil.rmtree(scratch)
    scratch.mkdir(mode=0o700, parents=True)
    return scratch


def _new_lock(folder: Path) -> int:
    """Create and lock the lock file; return its descriptor.

    The file gets its name only once it is locked: otherwise another server that starts could remove
    the folder as abandoned.
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
    """Hold a shared lock on an open file; close the file at the end of the context."""
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
    """Remove the folder if no other process holds its lock; return whether it was removed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True
