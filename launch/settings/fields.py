"""The names that can be set, the type of each, and how text becomes a value of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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

_ADDRESSES = ("url", "control")  # of one engine or several, in one text with spaces between
_WORDS = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False, "no": False, "off": False, "0": False
}  # fmt: skip


class Value(NamedTuple):
    """The value of a setting and its source."""

    value: Any
    origin: str  # the source, in words


class Fields:
    """The dotted names, such as ``engine.hot_bytes``, and types of a struct of structs.

    ``sections`` are the names that hold other names, such as ``engine`` and ``engine.vllm``.
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

    def value(self, name: str, given: Any, origin: str, *, is_text: bool) -> Value:
        """Read ``given`` as the value of a known name; sizes and durations may have a unit.

        Args:
            is_text: ``given`` is a string because its source has only strings.

        Raises:
            UsageError: the text cannot be read as a value of the setting's type.
        """
        if isinstance(given, list) and name.rpartition(".")[2] in _ADDRESSES:
            given = " ".join(map(str, given))
        parse = _parser(name, self.types[name], is_text)
        if parse is None or not isinstance(given, str):
            return Value(given, origin)
        try:
            return Value(parse(given), origin)
        except ValueError as error:
            raise UsageError(f"{name} (from {origin}): {error}") from error


def unknown(shown: str, origin: str, known: Mapping[str, Any]) -> UsageError:
    """Make the error for an unknown setting; it suggests the nearest known name."""
    close = difflib.get_close_matches(shown, known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else ""
    return UsageError(f"{shown} in {origin} is not a setting{hint}")


def _parser(name: str, kind: Type, is_text: bool) -> Callable[[str], Any] | None:
    if name.endswith("_bytes"):
        return parse_bytes
    if name.endswith("_s"):
        return parse_duration
    if not is_text:
        return None
    match kind:
        case UnionType(types) if some := [x for x in types if not isinstance(x, NoneType)]:
            return _parser(name, some[0], is_text)
        case BoolType():
            return _parse_bool
        case IntType():
            return _parse_int
        case FloatType():
            return _parse_float
        case VarTupleType():
            return _parse_list
    return None


def _parse_bool(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise ValueError(f"{text!r} is neither true nor false")
    return _WORDS[text.lower()]


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _parse_list(text: str) -> list[str]:
    """Split at commas, or read a list in brackets as JSON and TOML write it."""
    if text.lstrip().startswith("["):
        try:
            return msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError as error:
            raise ValueError(f"{text!r} is no JSON list of strings: {error}") from None
    return [part.strip() for part in text.split(",") if part.strip()]
