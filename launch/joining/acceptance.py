"""Makes settings of an invitation: a private folder with the secret, the keys, and a TOML file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from launch.errors import LaunchError
from launch.joining.invitation import Invitation

SETTINGS: Final = "thermocline.toml"
SECRET: Final = "secret"
KEYS: Final = "keys"
ADMIN_KEYS: Final = "admin-keys"


def accept(invitation: Invitation, folder: Path) -> Path:
    """Write what an invitation says into ``folder``; return the path of the settings.

    Raises:
        LaunchError: it cannot be written, or a server here has joined others already.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        there = folder / SECRET
        if there.exists() and there.read_bytes() != invitation.secret:
            raise LaunchError(
                f"{there} is of other servers; what was stored under it would be lost: remove"
                f" {folder} first if that is meant"
            )
        _write(there, invitation.secret)
        for name, lines in ((KEYS, invitation.keys), (ADMIN_KEYS, invitation.admin_keys)):
            if lines:
                _write(folder / name, "".join(f"{x}\n" for x in lines).encode())
        _write(folder / SETTINGS, "".join(_toml(invitation, folder)).encode())
    except OSError as error:
        raise LaunchError(f"{folder} cannot be written: {error.strerror}") from error
    return folder / SETTINGS


def _toml(invitation: Invitation, folder: Path) -> Iterator[str]:
    yield "# Written by `thermocline join`. It holds the address of Redis with its password.\n"
    yield "[store]\n"
    yield f"redis_url = {json.dumps(invitation.redis_url)}\n"
    yield f"secret_file = {json.dumps(str(folder / SECRET))}\n"
    yield f"encrypt = {json.dumps(invitation.encrypt)}\n"
    yield f"chunk_tokens = {invitation.chunk_tokens}\n"
    for name in ("codec", "disk_codec", "redis_codec"):
        yield f"{name} = {json.dumps(getattr(invitation, name))}\n"
    yield f"max_kl = {invitation.max_kl!r}\n"
    if invitation.keys or invitation.admin_keys:
        yield "\n[gateway]\n"
    if invitation.keys:
        yield f"api_keys_file = {json.dumps(str(folder / KEYS))}\n"
    if invitation.admin_keys:
        yield f"admin_keys_file = {json.dumps(str(folder / ADMIN_KEYS))}\n"


def _write(path: Path, content: bytes) -> None:
    """Replace a file at once; it is this user's alone."""
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except OSError:
        Path(draft).unlink()
        raise
