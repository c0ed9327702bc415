"""Files that somebody asked for: looked at before minutes are spent, written whole or not at all.

What is there and is no file (a pipe, ``/dev/stdout``) is written to as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.errors import LaunchError, UsageError


def check_output(option: str, path: Path) -> None:
    """Raises ``UsageError`` if nothing can be written there."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"{option} {path}: this is a folder; give the name of a file")
    if not _is_special(path) and not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: nothing may be written into {path.parent}")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write it. A reader never sees half of it, and an older one stays until it is whole.

    Raises ``LaunchError``.
    """
    if _is_special(path):
        yield path
        return
    target = path.resolve()  # a link stays a link
    fresh = target.with_name(f".{target.stem}.{os.getpid()}.new{target.suffix}")
    try:
        yield fresh
        fresh.replace(target)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error}") from error
    finally:
        fresh.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
