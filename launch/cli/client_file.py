"""Changes to a client's own file of settings.

What the file had before is kept beside it, once. A file that cannot be read is left as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

import tomlkit
from tomlkit.exceptions import TOMLKitError

from engines.files import replace_file
from gateway.clients.needs import FileChange, Format, printable, yaml_line
from launch.errors import LaunchError

BACKUP_SUFFIX: Final = ".before-thermocline"
_PRIVATE: Final = 0o600  # a key may stand in it
# Readers of .env files take these as they stand.
_BARE: Final = re.compile(r"[A-Za-z0-9_./:@%+,=\\-]+")


def write(change: FileChange) -> Path | None:
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


def merged(text: str, change: FileChange) -> str:
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


def _merged_json(text: str, change: FileChange) -> str:
    values = json.loads(text) if text.strip() else {}
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    _put(values, change.values)
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _merged_toml(text: str, change: FileChange) -> str:
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


def _merged_yaml(text: str, change: FileChange) -> str:
    return _with_lines(text, {f"{key}:": yaml_line(key, x) for key, x in change.values.items()})


def _merged_dotenv(text: str, change: FileChange) -> str:
    return _with_lines(text, {f"{key}=": _dotenv_line(key, x) for key, x in change.values.items()})


def _with_lines(text: str, ours: Mapping[str, str]) -> str:
    """Put lines in the place of those that begin alike, spaces apart; the others stay."""
    lines = text.removesuffix("\n").split("\n") if text else []
    for beginning, line in ours.items():
        key, separator = re.escape(beginning[:-1]), re.escape(beginning[-1])
        same = re.compile(rf"(?:export\s+)?{key}\s*{separator}")
        places = [i for i, x in enumerate(lines) if same.match(x)]
        if places:
            lines[places[-1]] = line  # of several the last one counts
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _dotenv_line(key: str, value: str) -> str:
    """Write a value so that all readers of .env files read it back; they differ in escapes.

    Raises ``ValueError`` for one that some would change.
    """
    if _BARE.fullmatch(printable(value)):
        return f"{key}={value}"
    for quote in "'\"":
        if quote not in value and "\\" not in value:
            return f"{key}={quote}{value}{quote}"
    raise ValueError(f"a value with quotes and backslashes cannot be written: {value!r}")


_MERGERS: Final[Mapping[Format, Callable[[str, FileChange], str]]] = {
    "json": _merged_json,
    "toml": _merged_toml,
    "yaml": _merged_yaml,
    "lines": _merged_dotenv,
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
    replace_file(path, text.encode(), mode)
