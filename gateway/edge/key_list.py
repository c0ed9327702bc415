"""The lines of API keys: those of the settings, and those of a file that admins can change.

The file is replaced as a whole (0600), so a crash leaves the old list or the new one. A line that
added by hand meanwhile is safe, too: the file is read again before each change.
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
    """The list cannot be changed so; the message gives the reason and the remedy."""


class KeyLines(NamedTuple):
    """All lines, by the rights that they give."""

    usual: list[str]
    admin: list[str]


class KeyList:
    """The keys of a running server, and their file. Runs on any one thread at a time."""

    def __init__(self, tenants: Tenants, config: GatewayConfig) -> None:
        self._tenants = tenants
        self._config = config
        self._changing = threading.Lock()

    def reconfigure(self, config: GatewayConfig) -> None:
        """Take the keys that the settings name now.

        Raises:
            BadKeyLine, OSError, UnicodeDecodeError: all stays as it was.
        """
        with self._changing:
            self._tenants.replace(*lines_of(config))
            self._config = config

    def listed(self) -> list[tuple[Key, str]]:
        """List the keys, and where each is written: "file" or "settings"."""
        in_file = {x.id for x in read_keys(self._file_lines())}
        found = _keys_of(self._config)
        return [(x, "file" if x.id in in_file and not x.admin else "settings") for x in found]

    def add(self, line: str) -> None:
        """Add a line, for the next request on.

        Raises:
            KeyListFixed: there is no file, or no key is needed so far.
            BadKeyLine, OSError: nothing was changed.
        """
        with self._changing:
            self._write([*self._file_lines(), line])

    def revoke(self, key_id: str) -> bool:
        """Take the line of a key out, for the next request on; return False if there is none.

        Raises:
            KeyListFixed: the key is written in the settings, if only as well, or it is the last.
            BadKeyLine, OSError: nothing was changed.
        """
        with self._changing:
            lines = self._file_lines()
            kept = [x for x in lines if not any(y.id == key_id for y in read_keys([x]))]
            if self._is_settled(key_id):  # it would open as much as before
                raise KeyListFixed(
                    "This key is written elsewhere than in gateway.api_keys_file. Take its line out"
                    " of the settings or the file of admin keys and send SIGHUP to the server."
                )
            if len(kept) == len(lines):
                return False
            self._write(kept)
            return True

    def _is_settled(self, key_id: str) -> bool:
        """Say whether a key is written anywhere but in the file that admins change."""
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
                "This server needs no key, and a first one would lock out all who have none. Make"
                " it with `thermocline keys new TENANT --append FILE` and start the server anew."
            )
        usual = [*self._config.api_keys, *lines]
        if not read_keys(usual):
            raise KeyListFixed(
                "This is the last key: without any, none would be needed. Make another one first."
            )
        admin = lines_of(self._config).admin
        Tenants(bytes(16), usual, admin)  # raises before anything is written
        replace_file(Path(file), "".join(f"{x}\n" for x in lines).encode())
        self._tenants.replace(usual, admin)


def lines_of(config: GatewayConfig) -> KeyLines:
    """Read all lines that the settings name. Raises ``OSError`` or ``UnicodeDecodeError``."""
    usual, admin = list(config.api_keys), list(config.admin_keys)
    if config.api_keys_file:
        usual += read_key_lines(config.api_keys_file)
    if config.admin_keys_file:
        admin += read_key_lines(config.admin_keys_file)
    return KeyLines(usual, admin)


def _keys_of(config: GatewayConfig) -> list[Key]:
    lines = lines_of(config)
    return [*read_keys(lines.usual), *read_keys(lines.admin, admin=True)]
