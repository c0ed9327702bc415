"""Merges our settings into a client's own settings file.

The first change keeps the file's former content in a backup beside it. A file that cannot be parsed
is not changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final

import tomlkit
from tomlkit.exceptions import TOMLKitError

from engines.files import replace_file
from gateway.clients.needs import FileChange, Format, printable, yaml_line
from launch.errors import LaunchError

BACKUP_SUFFIX: Final = ".before-thermocline"
_PRIVATE: Final = 0o600  # the file may contain an API key
# Values that all readers of .env files take without quotes.
_BARE: Final = re.compile(r"[A-Za-z0-9_./:@%+,=\\-]+")
# Lines of a YAML mapping: a line with a key, and a line that belongs to the value of a key above.
_OF_MAPPING: Final = re.compile(r"([\"']?)[\w.-]+\1\s*:(\s|$)")
_BELOW: Final = re.compile(r"\s|-(\s|$)")


def write(change: FileChange) -> Path | None:
    """Merge a change into its file; return the path of the backup, None if the file was empty.

    Raises:
        LaunchError: the file cannot be read, merged or written; it is unchanged.
    """
    path = change.path.resolve()  # a symbolic link is kept, and its target written
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
    """Return ``text``, the file's content, with the change merged into it.

    Raises:
        LaunchError: ``text`` is not in the file's format, or our keys have values of another kind.
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
    ours = {key: yaml_line(key, x) for key, x in change.values.items()}
    lines = [x for x in text.splitlines() if not re.match(r"\s*(#|$)", x)]
    _check_mapping(lines[1:] if lines[:1] == ["---"] else lines, ours)
    return _with_lines(text, ours, ":")


def _check_mapping(lines: Sequence[str], ours: Collection[str]) -> None:
    """Check that YAML is a mapping in which each of our keys, if present, takes a single line.

    Raises ``ValueError`` otherwise.
    """
    own, named, before = _of_keys(ours, ":"), _of_keys(ours, r":\s*&"), ""
    for line in lines:
        if _BELOW.match(line) is None:
            before = line if _OF_MAPPING.match(line) else ""
        if not before:
            raise ValueError(f"{line[:40]!r} is no key")
        if own.match(before) and (line is not before or named.match(line)):
            raise ValueError(f"the value at {before[:40]!r} is more than its line")


def _merged_dotenv(text: str, change: FileChange) -> str:
    ours = {key: _dotenv_line(key, x) for key, x in change.values.items()}
    return _with_lines(text, ours, "=", r"\s*(?:export\s+)?")


def _of_keys(keys: Collection[str], separator: str, before: str = "") -> re.Pattern[str]:
    names = "|".join(map(re.escape, keys))
    return re.compile(rf"{before}([\"']?)(?:{names})\1\s*{separator}")


def _with_lines(text: str, ours: Mapping[str, str], separator: str, before: str = "") -> str:
    """Replace the lines of the keys in ``ours``, and append those that ``text`` does not have."""
    lines = text.removesuffix("\n").split("\n") if text else []
    for key, line in ours.items():
        same = _of_keys([key], separator, before)
        places = [i for i, x in enumerate(lines) if same.match(x)]
        if places:
            lines[places[-1]] = line  # the last line of a key is the one that counts
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _dotenv_line(key: str, value: str) -> str:
    """Return a line that all readers of .env files read as ``value``; they differ in escapes.

    Raises ``ValueError`` if there is no such line.
    """
    if _BARE.fullmatch(printable(value)):
        return f"{key}={value}"
    for quote in "'\"":
        if not any(x in value for x in (quote, "\\", "${")):  # some readers expand ${NAME}
            return f"{key}={quote}{value}{quote}"
    raise ValueError(f"a value with ${{, or quotes and backslashes, cannot be written: {value!r}")


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
    if not backup.exists():  # the first backup has the user's own content
        _replace(backup, text)
    return backup


def _replace(path: Path, text: str) -> None:
    """Write a file atomically; a new file is private, an existing one keeps its mode."""
    mode = path.stat().st_mode & 0o777 if path.exists() else _PRIVATE
    replace_file(path, text.encode(), mode)
