"""Output files of ``calibrate``: checked before minutes are spent, written whole or not at all.

A path that exists and is no regular file (a pipe, ``/dev/stdout``) is written to directly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from launch.errors import LaunchError, UsageError


def check_output(option: str, path: Path) -> None:
    """Check that ``path`` can be written. Raises ``UsageError`` if it cannot."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"{option} {path}: this is a folder; give the name of a file")
    if not _is_special(path) and not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: nothing may be written into {path.parent}")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path to write to, and put it in the place of ``path`` when the block ends.

    Readers see the older file until the new one is whole. Raises ``LaunchError`` if it cannot be
    written.
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


def write_json(content: msgspec.Struct, path: Path) -> None:
    """Write ``content`` as indented JSON. Raises ``LaunchError`` if that fails."""
    with whole_file(path) as file:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
