"""Changes to a client's own file of settings.

What the file had before is kept beside it, once. A file that cannot be read is left as it is.
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
_PRIVATE: Final = 0o600  # a key may stand in it
# Readers of .env files take these as they stand.
_BARE: Final = re.compile(r"[A-Za-z0-9_./:@%+,=\\-]+")
# Lines of a mapping in YAML: those of its keys, and those below one.
_OF_MAPPING: Final = re.compile(r"([\"']?)[\w.-]+\1\s*:(\s|$)")
_BELOW: Final = re.compile(r"\s|-(\s|$)")


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
    ours = {key: yaml_line(key, x) for key, x in change.values.items()}
    lines = [x for x in text.splitlines() if not re.match(r"\s*(#|$)", x)]
    _check_mapping(lines[1:] if lines[:1] == ["---"] else lines, ours)
    return _with_lines(text, ours, ":")


def _check_mapping(lines: Sequence[str], ours: Collection[str]) -> None:
    """Check that YAML is a mapping in whose lines ours can stand. Raises ``ValueError``."""
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
    """Put lines in the place of those of the same keys; the others stay."""
    lines = text.removesuffix("\n").split("\n") if text else []
    for key, line in ours.items():
        same = _of_keys([key], separator, before)
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
        if not any(x in value for x in (quote, "\\", "${")):  # some put a variable in its place
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
    if not backup.exists():  # the first one holds what was the user's own
        _replace(backup, text)
    return backup


def _replace(path: Path, text: str) -> None:
    """Write a file at once or not at all; a new one is private, an old one keeps its mode."""
    mode = path.stat().st_mode & 0o777 if path.exists() else _PRIVATE
    replace_file(path, text.encode(), mode)
