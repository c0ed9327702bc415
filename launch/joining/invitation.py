"""The file for a server that is to share another's sessions: settings, secret, keys.

The file holds the secret, so it is made for this user alone and never shown; it goes to the other
machine as other secrets go, by scp say, and is removed there once it was used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from gateway.config import LOOPBACK
from kvstore.roster import release
from kvstore.tiers.seal import LEAST_SECRET_BYTES, read_secret
from launch.errors import LaunchError, UsageError
from launch.serve.keys import key_lines
from launch.serve.secret import server_secret
from launch.settings.effective_settings import EffectiveSettings

STANDARD: Final = "-"  # standard output, or input
SEED_VARIABLE: Final = "PYTHONHASHSEED"

_MAX_BYTES: Final = 8 << 20
_FORM: Final = "thermocline-invitation-1"


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that a second server must have alike."""

    form: str = _FORM
    release: str
    secret: bytes  # base64 in the file
    redis_url: str
    encrypt: bool
    chunk_tokens: int
    codec: str
    disk_codec: str
    redis_codec: str
    max_kl: float
    hash_seed: str = ""
    keys: tuple[str, ...] = ()  # lines of the key list: hashes
    admin_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.form != _FORM:
            raise ValueError("it is of another release; make it anew")
        if len(self.secret) < LEAST_SECRET_BYTES:
            raise ValueError("its secret is too short")


def invitation_of(
    effective: EffectiveSettings, environ: Mapping[str, str], redis_url: str = ""
) -> Invitation:
    """Put together what a second server needs.

    Args:
        redis_url: how other machines reach this server's Redis; "" = as it does.

    Raises:
        UsageError, LaunchError: this server has no Redis, or its secret cannot be read.
    """
    store, gateway = effective.settings.store, effective.settings.gateway
    if not store.redis_url:
        raise UsageError(
            "servers share sessions by a Redis: set store.redis_url here first, and start again"
        )
    try:
        own = Path(store.secret_file).expanduser() if store.secret_file else None
        secret = read_secret(own) if own else server_secret(effective.folders.data)
    except ValueError as error:
        raise UsageError(str(error)) from error
    keys, admin_keys = key_lines(gateway)
    return Invitation(
        release=release(),
        secret=secret,
        redis_url=redis_url or store.redis_url,
        encrypt=store.encrypt,
        chunk_tokens=store.chunk_tokens,
        codec=store.codec,
        disk_codec=store.disk_codec,
        redis_codec=store.redis_codec,
        max_kl=store.max_kl,
        hash_seed=environ.get(SEED_VARIABLE, ""),
        keys=tuple(keys),
        admin_keys=tuple(admin_keys),
    )


def is_local(redis_url: str) -> bool:
    """Say whether only this machine can reach a Redis at that address."""
    parts = urlsplit(redis_url)
    return parts.scheme == "unix" or (parts.hostname or "localhost") in LOOPBACK


def write_invitation(invitation: Invitation, file: str) -> None:
    """Write it to a new file that this user alone can read, or to standard output.

    Raises:
        UsageError: standard output is a terminal. LaunchError: the file is there, or cannot be
            written.
    """
    content = msgspec.json.format(msgspec.json.encode(invitation)) + b"\n"
    if file == STANDARD:
        if sys.stdout.isatty():
            raise UsageError("it holds the secret, and is not shown: name a file, or pipe it on")
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        return
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror}") from error


def read_invitation(file: str) -> Invitation:
    """Read it from a file or from standard input.

    Raises:
        UsageError: it cannot be read, or is none; the message quotes nothing of it.
    """
    try:
        if file == STANDARD:
            content = sys.stdin.buffer.read(_MAX_BYTES)
        else:
            with Path(file).open("rb") as stream:
                content = stream.read(_MAX_BYTES)
    except OSError as error:
        raise UsageError(f"the invitation {file} cannot be read: {error.strerror}") from error
    try:
        return msgspec.json.decode(content, type=Invitation)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UsageError(
            "this is no invitation of this release; make one where a server runs already:"
            " thermocline join --invite FILE"
        ) from None
