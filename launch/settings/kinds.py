"""Describes the values that a setting takes, for messages and for the page of all settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.inspect import (
    BoolType,
    FloatType,
    IntType,
    LiteralType,
    Metadata,
    NoneType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
)

from launch.settings.units import shown


def takes(name: str, kind: Type, quoted: Callable[[str], str] = str) -> str:
    """Return a description of the values that the setting ``name`` takes.

    ``quoted`` formats literal values. A type with a pattern is described by its first example.
    """
    if isinstance(kind, IntType | FloatType):
        what = "a whole number" if isinstance(kind, IntType) else "a number"
        units = {"bytes": "a size", "s": "a time"}
        return ", ".join((units.get(name.rpartition("_")[2], what), *_bounds(name, kind)))
    match kind:
        case BoolType():
            return f"{quoted('true')}, {quoted('false')}"
        case LiteralType(values):
            return ", ".join(quoted(str(x)) if x else "nothing" for x in values)
        case Metadata(_, {"examples": [example, *_]}):
            return f"text such as {quoted(str(example))}"
        case VarTupleType(StructType()):
            return f"tables {quoted(f'[[{name}]]')} of a file"
        case VarTupleType(Metadata() as item):
            return f"a list of {takes(name, item, quoted)}"
        case VarTupleType():
            return "a list"
        case UnionType(types):
            return " or ".join(
                "nothing" if isinstance(x, NoneType) else takes(name, x, quoted) for x in types
            )
    return "text"


def _bounds(name: str, kind: IntType | FloatType) -> Iterator[str]:
    for words, bound in (
        ("at least", kind.ge),
        ("more than", kind.gt),
        ("at most", kind.le),
        ("less than", kind.lt),
    ):
        if bound is not None:
            yield f"{words} {shown(name, bound)}"
    if kind.multiple_of:
        yield f"a multiple of {shown(name, kind.multiple_of)}"
