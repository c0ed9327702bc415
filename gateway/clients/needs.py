"""The address, model and key of a server, and the settings that a client needs to use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

Format: TypeAlias = Literal["json", "toml", "yaml", "lines"]  # lines: KEY=VALUE, as in .env
NO_KEY: Final = "none"  # most clients insist on a key, even if the server needs none


@dataclass(frozen=True)
class Server:
    """A running server, with the facts that its clients need."""

    url: str  # without a path
    model: str
    max_context: int
    key: str = NO_KEY

    @property
    def needs_key(self) -> bool:
        return self.key != NO_KEY


@dataclass(frozen=True)
class FileChange:
    """Values to write into a client's own file of settings."""

    path: Path
    format: Format
    values: Mapping[str, Any]  # nested as in the file; None = remove the entry


@dataclass(frozen=True)
class Connection:
    """A client's settings: lines for people to read, and the change to its file if it has one."""

    lines: list[str]
    change: FileChange | None = None
    notes: list[str] = field(default_factory=list)


def exports(values: Mapping[str, str]) -> list[str]:
    """Return shell commands that set environment variables."""
    return [f"export {key}={quoted(value)}" for key, value in values.items()]


def yaml_line(key: str, value: str) -> str:
    """Return a line of YAML whose value is in double quotes, as in JSON.

    Raises:
        ValueError: the value has control characters.
    """
    return f"{key}: {json.dumps(printable(value), ensure_ascii=False)}"


def printable(value: str) -> str:
    """Return ``value`` unchanged. Raises ``ValueError`` if it has control characters."""
    if not value.isprintable():
        raise ValueError("a value has control characters")
    return value


def quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
