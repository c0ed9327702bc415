"""The server's secret: 32 random bytes that every tenant's salt is derived from.

Made once. Losing it makes every cold session unreadable, which costs a recompute; leaking it lets
a tenant compute the cache keys of another, so nobody else may read the file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from launch.errors import LaunchError

NUM_BYTES = 32


def server_secret(data_dir: Path) -> bytes:
    """Read the secret, or make it.

    Raises:
        LaunchError: others can read it, it was cut short, or the folder cannot be written.
    """
    path = data_dir / "secret"
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(path)
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


def _create(path: Path) -> None:
    """Nothing happens if it exists. Linked into place, so that no reader sees half of it."""
    if path.exists():
        return
    draft = path.with_name(f".secret.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(NUM_BYTES))
        with contextlib.suppress(FileExistsError):  # another server was faster; take its secret
            os.link(draft, path)
    finally:
        draft.unlink()
