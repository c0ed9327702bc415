"""The files of profiles: one for each model, in a folder of the data folder."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO

from kvstore.codecs.names import first_part
from kvstore.codecs.profile import OF_WINDOWS, UNFINISHED, Profile, load_profile
from kvstore.errors import Corrupt, Mismatch

logger = logging.getLogger(__name__)

LOCK: Final = "writing.lock"
MEASURING: Final = ".measuring.lock"


def profile_path(data: Path, fingerprint: str) -> Path:
    """The file of the model with this fingerprint."""
    return data / "profiles" / f"{fingerprint}.tcpf"


def make_folder(data: Path) -> None:
    """Make the folder of profiles. Raises ``OSError`` if none can be written into it.

    Called before minutes are spent on measuring.
    """
    folder = data / "profiles"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(folder):
        pass


def save(profile: Profile, data: Path) -> Path:
    """Write the profile and return its file. Raises ``OSError``.

    Presets that are only in an older profile of the model are kept from there.
    """
    path = profile_path(data, profile.fingerprint)
    make_folder(data)
    with _alone(path.parent):
        for unfinished in path.parent.glob(f"{path.name}.*{UNFINISHED}"):
            unfinished.unlink(missing_ok=True)  # of writers that were killed
        if path.exists():
            profile = _with_older(profile, path)
        profile.save(path)
    return path


def load(data: Path, fingerprint: str) -> Profile | None:
    """Read the profile of a model; None if there is none that can be used."""
    path = profile_path(data, fingerprint)
    try:
        # Many presets were learned, and one or two serve: only those get memory.
        return load_profile(path, mapped=True)
    except FileNotFoundError:
        return None
    except (OSError, Corrupt, Mismatch) as error:
        logger.warning("what was measured on this model cannot be used: %s", error)
        return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder: of two calibrations that end together none must undo the other's result."""
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system frees the lock of the dead
        yield


@contextmanager
def locked(data: Path, fingerprint: str, wait: Callable[[], None]) -> Iterator[None]:
    """Lock the measurement of one model; ``wait`` is called while another process has the lock.

    Raises ``OSError`` if nothing can be written into the folder, and any error of ``wait``.
    """
    make_folder(data)
    with (data / "profiles" / f"{fingerprint}{MEASURING}").open("w") as lock:
        while not _try_lock(lock):
            wait()
        yield


def _try_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _with_older(profile: Profile, path: Path) -> Profile:
    try:
        older = load_profile(path)
    except (Corrupt, Mismatch) as error:
        logger.info("%s is replaced: %s", path, error)
        return profile
    ropes = profile.ropes or older.ropes
    if older.layout != profile.layout or older.ropes not in ((), ropes):
        return profile
    fresh = {(row.preset, row.context) for row in profile.rows}
    anew = {x for x, digits in profile.ids.items() if older.ids.get(x) != digits}
    kept = [
        row
        for row in older.rows
        if anew.isdisjoint((first_part(row.preset), first_part(row.preset) + OF_WINDOWS))
        and (row.preset, row.context) not in fresh
    ]
    return replace(
        profile,
        ropes=ropes,
        learned={**older.learned, **profile.learned},
        rows=(*kept, *profile.rows),
        windows=profile.windows or older.windows,
        window_ropes=profile.window_ropes or older.window_ropes,
    )
