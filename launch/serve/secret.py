"""The server's secret, which is made at the first start.

If it is lost, no cold session can be read, and all are computed again. If it leaks, a tenant can
compute the cache keys of another, so no other user may read the file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvstore.tiers.seal import read_secret
from launch.errors import LaunchError, UsageError
from launch.settings.schema import Settings

NUM_BYTES = 32


def secret_path(data_dir: Path) -> Path:
    return data_dir / "secret"


def secret_of(settings: Settings, data_dir: Path) -> bytes:
    """Return the secret from which salts and seals are derived: ``store.secret_file``, or our own.

    Raises ``UsageError`` or ``LaunchError`` if it cannot be read.
    """
    if not settings.store.secret_file:
        return server_secret(data_dir)
    try:
        return read_secret(Path(settings.store.secret_file).expanduser())
    except ValueError as error:
        raise UsageError(str(error)) from error


def server_secret(data_dir: Path, sync: Callable[[int], None] = os.fsync) -> bytes:
    """Return the 32 bytes of the secret in the data folder; make it if there is none yet.

    Args:
        sync: flushes an open file or folder (a descriptor) to the disk, as ``os.fsync``.

    Raises:
        LaunchError: other users can read it, it has another length, or it cannot be written.
    """
    path = secret_path(data_dir)
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = "this is a file" if isinstance(error, FileExistsError) else error.strerror
        raise LaunchError(
            f"the data folder {data_dir} cannot be made: {reason}; choose another with --data-dir"
            " or THERMOCLINE_DATA_DIR"
        ) from error
    try:
        _create(path, sync)
        content = path.read_bytes()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise LaunchError(
            f"the server's secret {path} cannot be used: {error.strerror}; give this user a"
            " data folder of its own with --data-dir or THERMOCLINE_DATA_DIR"
        ) from error
    if mode & 0o077:
        raise LaunchError(f"other users can read the server's secret; run: chmod 600 {path}")
    if len(content) != NUM_BYTES:
        raise LaunchError(f"{path} is damaged; remove it (cold sessions will be computed anew)")
    return content


def _create(path: Path, sync: Callable[[int], None]) -> None:
    """Write a new secret to ``path``, unless the file exists.

    A finished draft is linked into place, so that no reader sees a part of it. The draft is synced
    to the disk before: after a power cut there is the whole secret or no file. An empty file would
    keep the server from starting.
    """
    if path.exists():
        return
    descriptor, draft_name = tempfile.mkstemp(prefix=".secret.", dir=path.parent)  # 0600
    draft = Path(draft_name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(NUM_BYTES))
            file.flush()
            sync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another server was faster; take its secret
            os.link(draft, path)
    finally:
        draft.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        sync(folder)
    finally:
        os.close(folder)
