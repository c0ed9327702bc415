"""Invites a server to share another's sessions, makes its settings, and calls the roll of engines.

The file holds the secret, so it is made for this user alone and never shown; it goes to the other
machine as other secrets go, by scp say, and is removed there once it was used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
import tomlkit

from engines.files import replace_file
from gateway.config import LOOPBACK
from kvstore.errors import TierUnavailable
from kvstore.membership import among, compared
from kvstore.roster import EntrySeal, Facts, Roster, release
from kvstore.stats import Difference
from kvstore.tiers.seal import LEAST_SECRET_BYTES, read_secret
from launch.errors import LaunchError, UsageError
from launch.serve.keys import key_lines, secret_of, secret_path
from launch.serve.sharing import redis_link
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.schema import masked

STANDARD: Final = "-"  # standard output, or input
SEED_VARIABLE: Final = "PYTHONHASHSEED"

_MAX_BYTES: Final = 8 << 20
_FORM: Final = "thermocline-invitation-1"
SETTINGS: Final = "thermocline.toml"
SECRET: Final = "secret"
KEYS: Final = "keys"
ADMIN_KEYS: Final = "admin-keys"
DEADLINE_S: Final = 3.0


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
    keys, admin_keys = key_lines(gateway)
    return Invitation(
        release=release(),
        secret=secret_of(effective.settings, effective.folders.data),
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
        replace_file(there, invitation.secret)
        for name, lines in ((KEYS, invitation.keys), (ADMIN_KEYS, invitation.admin_keys)):
            if lines:
                replace_file(folder / name, "".join(f"{x}\n" for x in lines).encode())
        replace_file(folder / SETTINGS, _toml(invitation, folder).encode())
    except OSError as error:
        raise LaunchError(f"{folder} cannot be written: {error.strerror}") from error
    return folder / SETTINGS


def _toml(invitation: Invitation, folder: Path) -> str:
    alike = ("redis_url", "encrypt", "chunk_tokens", "codec", "disk_codec", "redis_codec", "max_kl")
    store = {name: getattr(invitation, name) for name in alike}
    files = {"api_keys_file": invitation.keys, "admin_keys_file": invitation.admin_keys}
    names = {"api_keys_file": KEYS, "admin_keys_file": ADMIN_KEYS}
    gateway = {setting: str(folder / names[setting]) for setting, x in files.items() if x}
    tables = {"store": {**store, "secret_file": str(folder / SECRET)}, "gateway": gateway}
    head = "# Written by `thermocline join`. It holds the address of Redis with its password.\n"
    return head + tomlkit.dumps(tables)


class RollCall(NamedTuple):
    """Names the engines that are there."""

    alike: int  # engines that have the same secret
    differing: tuple[Difference, ...]


def roll_call(effective: EffectiveSettings, environ: Mapping[str, str]) -> RollCall:
    """Look at the engines on the Redis of these settings; nothing is written there.

    Raises:
        UsageError: ``store.redis_url`` is no address of a Redis.
        LaunchError: redis-py is missing, the server does not answer, or the secret cannot be read.
    """
    store = effective.settings.store
    path = Path(store.secret_file).expanduser() if store.secret_file else None
    own = path or secret_path(effective.folders.data)
    try:
        secret = read_secret(own) if path or own.exists() else b""
    except ValueError as error:
        raise LaunchError(str(error)) from error
    link = redis_link(store, DEADLINE_S)
    try:
        entries = Roster(link, EntrySeal(secret)).look()
    except TierUnavailable as error:
        raise LaunchError(f"{masked('', store.redis_url)} does not answer: {error}") from error
    finally:
        link.close()
    # Only an engine knows which model it will serve: there is no model of this name.
    here = Facts(model="", fingerprint="", encrypt=store.encrypt)
    members = compared(here, entries)
    theirs = {x.facts.hash_seed for x in entries if x.facts is not None and x.facts.part}
    seed = environ.get(SEED_VARIABLE, "")
    differing = [*members.differing, *among(entries)]
    if effective.engine_kind == "vllm" and theirs - {seed}:
        words = f"engines of vLLM on this Redis have another {SEED_VARIABLE}; set it alike"
        differing.append(Difference("seed", len(theirs - {seed}), words))
    return RollCall(sum(x.facts is not None for x in entries), tuple(differing))
