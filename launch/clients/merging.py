"""Puts values into a client's own file of settings, and loses nothing that stands there.

What the file had before is kept beside it, once. A file that cannot be read is left as it is.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

import tomlkit
from tomlkit.exceptions import TOMLKitError

from launch.clients.table import Change, Format
from launch.errors import LaunchError

BACKUP_SUFFIX: Final = ".before-thermocline"
_PRIVATE: Final = 0o600  # a key may stand in it


def write(change: Change) -> Path | None:
    """Merge a change into its file; returns where the file's former content is, if it had any.

    Raises:
        LaunchError: the file cannot be read, merged or written; it is as it was.
    """
    path = change.path.resolve()  # a link stays a link
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = merged(before, change)
        path.parent.mkdir(parents=True, exist_ok=True)
        backup = _back_up(path, before)
        if after != before:
            _replace(path, after)
        return backup
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path} cannot be changed: {error}") from error


def merged(text: str, change: Change) -> str:
    """Return the file's new text.

    Raises:
        LaunchError: ``text`` is not of the file's format, or has something else in our place.
    """
    try:
        return _MERGERS[change.format](text, change)
    except (ValueError, TOMLKitError) as error:
        raise LaunchError(
            f"{change.path} is not plain {change.format.upper()} ({error}): add the lines by hand"
        ) from error


def _merged_json(text: str, change: Change) -> str:
    values = json.loads(text) if text.strip() else {}
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    _put(values, change.values)
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _merged_toml(text: str, change: Change) -> str:
    document = tomlkit.parse(text)
    _put(document, change.values)
    return tomlkit.dumps(document)


def _put(target: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if value is None:
            target.pop(key, None)
            continue
        if not isinstance(value, Mapping):
            target[key] = value
            continue
        below = target.setdefault(key, {})
        if not isinstance(below, MutableMapping):
            raise ValueError(f"{key} is no table there")
        _put(target[key], value)


def _merged_lines(text: str, change: Change) -> str:
    lines = text.splitlines()
    for key, value in change.values.items():
        ours = f"{key}{change.separator}{value}"
        same = re.compile(
            rf"(?:export\s+)?{re.escape(key)}\s*{re.escape(change.separator.strip())}"
        )
        places = [i for i, line in enumerate(lines) if same.match(line)]
        if places:
            lines[places[-1]] = ours  # of several the last one counts
        else:
            lines.append(ours)
    return "\n".join(lines) + "\n"


_MERGERS: Final[Mapping[Format, Callable[[str, Change], str]]] = {
    "json": _merged_json,
    "toml": _merged_toml,
    "lines": _merged_lines,
}


def _back_up(path: Path, text: str) -> Path | None:
    if not text:
        return None
    backup = path.with_name(path.name + BACKUP_SUFFIX)
    if not backup.exists():  # the first one holds what was the user's own
        _replace(backup, text)
    return backup


def _replace(path: Path, text: str) -> None:
    """Write a file at once or not at all; a new one is private, an old one keeps its mode."""
    mode = path.stat().st_mode & 0o777 if path.exists() else _PRIVATE
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
