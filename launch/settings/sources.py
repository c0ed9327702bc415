"""The settings' names and types, and their sources: profiles, TOML, the environment, flags.

Each source becomes a ``Layer``: dotted names, each with a value and a description of its source.
An unknown name is an error in every source, since a misspelt setting that is silently ignored is
worse than a server that does not start.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec.inspect import (
    BoolType,
    FloatType,
    IntType,
    NoneType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from launch.errors import UsageError
from launch.settings.units import parse_bytes, parse_duration

PREFIX = "THERMOCLINE_"
# Read by the command line itself; not fields of the settings.
OTHER_VARIABLES = ("CONFIG", "PROFILE", "URL", "API_KEY")

_MOST = 1 << 63  # engines get settings as JSON, and its reader takes no larger numbers and no inf
_ADDRESSES = ("url", "control")  # the addresses of one engine or several, separated by spaces
_WORDS = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False, "no": False, "off": False, "0": False
}  # fmt: skip


class Value(NamedTuple):
    """The value of a setting and its source."""

    value: Any
    origin: str  # the source, in words


Layer: TypeAlias = dict[str, Value]


class Fields:
    """The dotted names, such as ``engine.hot_bytes``, and the types of all settings of a struct.

    ``sections`` are the names that contain other names, such as ``engine`` and ``engine.vllm``.
    """

    def __init__(self, settings: type[msgspec.Struct]) -> None:
        info = type_info(settings)
        assert isinstance(info, StructType)
        self.types: dict[str, Type] = {}
        self.tables: dict[str, type[msgspec.Struct]] = {}  # settings that are lists of tables
        self.sections: list[str] = []
        self._add(info, "")

    def _add(self, info: StructType, prefix: str) -> None:
        for field in info.fields:
            name = prefix + field.name
            if isinstance(field.type, StructType):
                self.sections.append(name)
                self._add(field.type, f"{name}.")
            else:
                self.types[name] = field.type
                if isinstance(field.type, VarTupleType):
                    item = field.type.item_type
                    if isinstance(item, StructType):
                        self.tables[name] = item.cls

    def kind(self, name: str) -> Type | None:
        """Return the type of a setting or of a table's field (``engines.share``); None if none."""
        table, _, field = name.partition(".")
        if field and table in self.tables:
            return Fields(self.tables[table]).kind(field)
        return self.types.get(name)

    def value(self, name: str, given: Any, origin: str, *, is_text: bool) -> Value:
        """Read ``given`` as the value of a known name; sizes and durations may have a unit.

        Args:
            is_text: ``given`` is a string because its source has only strings.

        Raises:
            UsageError: the text cannot be read as a value of the setting's type.
        """
        if isinstance(given, list) and name.rpartition(".")[2] in _ADDRESSES:
            given = " ".join(map(str, given))
        try:
            value = self._read(name, given, is_text)
            if isinstance(value, int | float) and not abs(value) < _MOST:  # nan is not, either
                raise ValueError(f"{given!r} is no number below 2**63")
        except ValueError as error:
            raise UsageError(f"{name} (from {origin}): {error}") from error
        return Value(value, origin)

    def _read(self, name: str, given: Any, is_text: bool) -> Any:
        if not isinstance(given, str):
            return given
        if name.endswith("_bytes"):
            return parse_bytes(given)
        if name.endswith("_s"):
            return parse_duration(given)
        if is_text and name in self.tables:
            raise ValueError(f"write a table [[{name}]] for each, in a file")
        return _parsed(self.types[name], given) if is_text else given


def unknown(shown: str, origin: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown setting; its message suggests the most similar name."""
    close = difflib.get_close_matches(shown, list(known), n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else ""
    return UsageError(f"{shown} in {origin} is not a setting{hint}")


def _parsed(kind: Type, text: str) -> Any:
    """Parse text as a value of a type. Raises ``ValueError`` if it is not one."""
    match kind:
        case UnionType(types) if some := [x for x in types if not isinstance(x, NoneType)]:
            return _parsed(some[0], text)
        case BoolType():
            if text.lower() not in _WORDS:
                raise ValueError(f"{text!r} is neither true nor false")
            return _WORDS[text.lower()]
        case IntType():
            return _number(int, text, "a whole number")
        case FloatType():
            return _number(float, text, "a number")
        case VarTupleType():
            return _parse_list(text)
    return text


def _number(kind: type[int] | type[float], text: str, words: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {words}") from None


def _parse_list(text: str) -> list[str]:
    """Split at commas, or read a list in brackets as JSON and TOML write it."""
    if text.lstrip().startswith("["):
        try:
            return msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError:
            raise ValueError(f'{text!r} is no JSON list of strings, such as ["a", "b"]') from None
    return [part.strip() for part in text.split(",") if part.strip()]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted names into a tree: ``engine.max_batch`` -> ``{"engine": {"max_batch": ...}}``."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, field = name.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[field] = value
    return tree


def from_file(fields: Fields, path: Path) -> Layer:
    """Read a TOML file. Raises ``UsageError``: no such file, not TOML, or an unknown setting."""
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"the configuration {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the configuration {path} is not text in UTF-8") from error
    return from_toml(fields, text, str(path))


def from_profile(fields: Fields, name: str) -> Layer:
    """Read a profile of this package. Raises ``UsageError`` if there is none of this name."""
    folder = files("launch") / "profiles"
    names = sorted(x.name.removesuffix(".toml") for x in folder.iterdir() if ".toml" in x.name)
    if name not in names:
        raise UsageError(f"there is no profile {name!r}; there are: {', '.join(names)}")
    return from_toml(fields, (folder / f"{name}.toml").read_text("utf-8"), f"profile {name}")


def from_toml(fields: Fields, text: str, origin: str) -> Layer:
    """Read TOML. Raises ``UsageError``: not TOML, or a key that is no setting."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin} is not TOML: {error}") from error
    layer = {}
    for name, given in _flat(fields, tree):
        if name not in fields.types:
            raise unknown(name, origin, fields.types)
        if name in fields.tables:
            layer[name] = _tables(fields, name, given, origin)
        else:
            layer[name] = fields.value(name, given, origin, is_text=False)
    return layer


def _tables(fields: Fields, name: str, given: Any, origin: str) -> Value:
    """Read a list of tables, such as ``[[engines]]``; the value is a list of dicts."""
    if not isinstance(given, list) or not all(isinstance(x, dict) for x in given):
        raise UsageError(f"{name} in {origin}: write a table [[{name}]] for each")
    of_entry = Fields(fields.tables[name])
    tables = []
    for tree in given:
        entry = {}
        for key, value in _flat(of_entry, tree):
            if key not in of_entry.types:
                raise unknown(f"{name}.{key}", origin, [f"{name}.{x}" for x in of_entry.types])
            entry[key] = of_entry.value(key, value, origin, is_text=False).value
        tables.append(nested(entry))
    return Value(tables, origin)


def _flat(fields: Fields, tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = prefix + key
        if name in fields.sections and isinstance(value, dict):
            yield from _flat(fields, value, f"{name}.")
        else:
            yield name, value


def from_environment(fields: Fields, environ: Mapping[str, str]) -> Layer:
    """Read every variable ``THERMOCLINE_*``.

    Raises:
        UsageError: a variable has this prefix but is no setting, or is not in capitals.
    """
    names = {variable_of(name): name for name in fields.types}
    others = {PREFIX + name for name in OTHER_VARIABLES}
    layer = {}
    for variable, text in environ.items():
        if not variable.upper().startswith(PREFIX) or variable in others:
            continue
        if variable not in names and variable.upper() in {*names, *others}:
            raise UsageError(
                f"{variable} in the environment is not read; in capitals: {variable.upper()}"
            )
        if variable not in names:
            raise unknown(variable, "the environment", [*names, *others])
        name = names[variable]
        layer[name] = fields.value(name, text, f"environment {variable}", is_text=True)
    return layer


def variable_of(name: str) -> str:
    """Return a setting's variable: ``engine.hot_bytes`` -> ``THERMOCLINE_ENGINE__HOT_BYTES``."""
    return PREFIX + name.upper().replace(".", "__")


def from_flags(fields: Fields, flags: Mapping[str, tuple[str, Any]]) -> Layer:
    """Read the flags of a command, ``{setting: (flag, value)}``; value None = not given."""
    return {
        name: fields.value(name, given, flag, is_text=True)
        for name, (flag, given) in flags.items()
        if given is not None
    }


def from_assignments(fields: Fields, assignments: Iterable[str]) -> Layer:
    """Read ``--set section.field=value``, for settings without a flag. Raises ``UsageError``."""
    layer = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not (name.strip() and equals):
            raise UsageError(f"--set {assignment}: write --set section.field=value")
        if name not in fields.types:
            raise unknown(name, "--set", fields.types)
        layer[name] = fields.value(name, text, "--set", is_text=True)
    return layer
