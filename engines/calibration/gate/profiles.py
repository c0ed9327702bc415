"""The files of profiles: one for each model, in a folder of the data folder."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvstore.codecs.names import first_part
from kvstore.codecs.profile import OF_WINDOWS, UNFINISHED, Profile, load_profile
from kvstore.errors import Corrupt, Mismatch

logger = logging.getLogger(__name__)

LOCK: Final = "writing.lock"
MEASURING: Final = ".measuring.lock"


def profile_path(data: Path, fingerprint: str) -> Path:
    """Return the path of the profile of the model with this fingerprint."""
    return data / "profiles" / f"{fingerprint}.tcpf"


def make_folder(data: Path) -> None:
    """Make the folder of profiles. Raises ``OSError`` if it is not writable.

    Called before minutes are spent on measuring.
    """
    folder = data / "profiles"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _held(folder / LOCK):
        pass


def save(profile: Profile, data: Path) -> Path:
    """Write the profile and return its path. Raises ``OSError``.

    Presets that only the model's older profile has are kept.
    """
    path = profile_path(data, profile.fingerprint)
    make_folder(data)
    with _held(path.parent / LOCK):  # so that two writers do not undo each other's results
        for unfinished in path.parent.glob(f"{path.name}.*{UNFINISHED}"):
            unfinished.unlink(missing_ok=True)  # left by writers that were killed
        if path.exists():
            profile = _with_older(profile, path)
        profile.save(path)
    return path


def load(data: Path, fingerprint: str) -> Profile | None:
    """Read the profile of a model; None if there is none that can be used."""
    path = profile_path(data, fingerprint)
    try:
        # Mapped, since only the one or two presets that serve need memory.
        return load_profile(path, mapped=True)
    except FileNotFoundError:
        return None
    except (OSError, Corrupt, Mismatch) as error:
        logger.warning("the measurements of this model cannot be used: %s", error)
        return None


def locked(data: Path, fingerprint: str, wait: Callable[[], None]) -> AbstractContextManager[None]:
    """Lock the measurement of one model; ``wait`` is called while another process has the lock.

    Raises ``OSError`` if nothing can be written into the folder, and any error of ``wait``.
    """
    make_folder(data)
    return _held(data / "profiles" / f"{fingerprint}{MEASURING}", wait)


@contextmanager
def _held(path: Path, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a file lock, which the system frees if this process dies; without ``wait``, block."""
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if wait else 0))
                break
            except BlockingIOError:
                assert wait is not None
                wait()
        yield


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
