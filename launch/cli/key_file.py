"""Makes API keys for ``thermocline keys``; the key file holds only their hashes."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.keys import BadKeyLine, generate_key
from launch.errors import LaunchError, UsageError


def new_key(tenant: str) -> tuple[str, str]:
    """A new key, and its line for the key file. Raises ``UsageError`` for an unusable name."""
    try:
        return generate_key(tenant)
    except BadKeyLine:
        raise UsageError(
            f"{tenant!r} cannot be a tenant's name: use up to 64 letters, digits, '.', '_' and '-',"
            " beginning with a letter or digit"
        ) from None


def append_line(file: Path, line: str) -> None:
    """Add ``line``; a new file is readable by its owner only. Raises ``LaunchError``."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b") as stream:
            held = stream.read()
            separator = b"" if not held or held.endswith(b"\n") else b"\n"
            stream.write(separator + line.encode() + b"\n")
    except OSError as error:
        raise LaunchError(f"the key file {file} cannot be written: {error.strerror}") from error
