"""The lines of API keys: those of the settings, and those of a file that admins can change.

The file is replaced as a whole (0600), so a crash leaves the old list or the new one. It is read
again before each change, so that a line that was added by hand is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from engines.files import replace_file
from gateway.config import GatewayConfig
from gateway.keys import Key, Tenants, read_key_lines, read_keys


class KeyListFixed(Exception):
    """The list cannot be changed like this; the message gives the reason and the remedy."""


class KeyLines(NamedTuple):
    """All lines of keys: those of usual callers, and those of admins."""

    usual: list[str]
    admin: list[str]


class KeyList:
    """The keys of a running server, and their file. Thread-safe."""

    def __init__(self, tenants: Tenants, config: GatewayConfig) -> None:
        self._tenants = tenants
        self._config = config
        self._changing = threading.Lock()

    def reconfigure(self, config: GatewayConfig) -> None:
        """Replace all keys by those that ``config`` names.

        Raises:
            BadKeyLine, OSError, UnicodeDecodeError: a line or a file cannot be read; nothing has
                changed.
        """
        with self._changing:
            self._tenants.replace(*lines_of(config))
            self._config = config

    def listed(self) -> list[tuple[Key, str]]:
        """Return all keys, each with the place of its line: "file" or "settings"."""
        in_file = {x.id for x in read_keys(self._file_lines())}
        found = _keys_of(self._config)
        return [(x, "file" if x.id in in_file and not x.admin else "settings") for x in found]

    def add(self, line: str) -> None:
        """Add a line to the file; its key is valid from the next request on.

        Raises:
            KeyListFixed: there is no file, or the server needs no key so far.
            BadKeyLine, OSError: nothing was changed.
        """
        with self._changing:
            self._write([*self._file_lines(), line])

    def revoke(self, key_id: str) -> bool:
        """Remove a key's line; from the next request on it is invalid. False if there is none.

        Raises:
            KeyListFixed: the key is also written elsewhere than in the file, or it is the last one.
            BadKeyLine, OSError: nothing was changed.
        """
        with self._changing:
            lines = self._file_lines()
            kept = [x for x in lines if not any(y.id == key_id for y in read_keys([x]))]
            if self._is_settled(key_id):  # the key would stay valid
                raise KeyListFixed(
                    "This key is written outside gateway.api_keys_file. Remove its line from the"
                    " settings or the file of admin keys, and send SIGHUP to the server."
                )
            if len(kept) == len(lines):
                return False
            self._write(kept)
            return True

    def _is_settled(self, key_id: str) -> bool:
        """Return whether a key is written elsewhere than in the file that admins change."""
        settled = msgspec.structs.replace(self._config, api_keys_file="")
        return any(x.id == key_id for x in _keys_of(settled))

    def _file_lines(self) -> list[str]:
        file = self._config.api_keys_file
        return read_key_lines(file) if file else []

    def _write(self, lines: Sequence[str]) -> None:
        file = self._config.api_keys_file
        if not file:
            raise KeyListFixed("This server has no gateway.api_keys_file to keep keys in.")
        if self._tenants.open_to_all:
            raise KeyListFixed(
                "This server needs no key so far, and a first one would lock out all other callers."
                " Make it with `thermocline keys new TENANT --append FILE` and restart the server."
            )
        usual = [*self._config.api_keys, *lines]
        if not read_keys(usual):
            raise KeyListFixed(
                "This is the last key; without it the server would need none. Make another first."
            )
        admin = lines_of(self._config).admin
        Tenants(bytes(16), usual, admin)  # raises before anything is written
        replace_file(Path(file), "".join(f"{x}\n" for x in lines).encode())
        self._tenants.replace(usual, admin)


def lines_of(config: GatewayConfig) -> KeyLines:
    """Read all lines of the settings and their files.

    Raises:
        OSError, UnicodeDecodeError: a file cannot be read.
    """
    usual, admin = list(config.api_keys), list(config.admin_keys)
    if config.api_keys_file:
        usual += read_key_lines(config.api_keys_file)
    if config.admin_keys_file:
        admin += read_key_lines(config.admin_keys_file)
    return KeyLines(usual, admin)


def _keys_of(config: GatewayConfig) -> list[Key]:
    lines = lines_of(config)
    return [*read_keys(lines.usual), *read_keys(lines.admin, admin=True)]
