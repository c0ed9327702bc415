"""A server as its clients see it, and the settings that a client needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

Format: TypeAlias = Literal["json", "toml", "yaml", "lines"]  # lines: KEY=VALUE, as in .env
NO_KEY: Final = "none"  # most clients want some key, also where the server needs none


@dataclass(frozen=True)
class Server:
    """A running server as its clients see it."""

    url: str  # without a path
    model: str
    max_context: int
    key: str = NO_KEY

    @property
    def needs_key(self) -> bool:
        return self.key != NO_KEY


@dataclass(frozen=True)
class FileChange:
    """The values that are to stand in a client's own file."""

    path: Path
    format: Format
    values: Mapping[str, Any]  # nested as in the file; None = it is not to stand there


@dataclass(frozen=True)
class Connection:
    """The needs of a client: lines for people, and a change for its file if it has one."""

    lines: list[str]
    change: FileChange | None = None
    notes: list[str] = field(default_factory=list)


def exports(values: Mapping[str, str]) -> list[str]:
    """Write the lines of a shell that set environment variables."""
    return [f"export {key}={quoted(value)}" for key, value in values.items()]


def yaml_line(key: str, value: str) -> str:
    """Write a line whose value is in double quotes, which YAML reads as JSON does.

    Raises ``ValueError`` for a value with control characters.
    """
    return f"{key}: {json.dumps(printable(value), ensure_ascii=False)}"


def printable(value: str) -> str:
    """Return the value. Raises ``ValueError`` for one with control characters."""
    if not value.isprintable():
        raise ValueError("a value has control characters")
    return value


def quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
