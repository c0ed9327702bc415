"""``docs/reference/settings.md``: what every setting takes, and its default."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.inspect import (
    BoolType,
    FloatType,
    IntType,
    LiteralType,
    NoneType,
    Type,
    UnionType,
    VarTupleType,
)

from docs.generators.tables import code, page, table
from launch.cli.options import FLAGS
from launch.settings.schema import Settings, flat
from launch.settings.sources import Fields
from launch.settings.units import shown

INTRODUCTION = """
What each setting takes, and its default before the machine and a profile are looked at (budgets
in bytes are then fitted to the machine). What they mean: [Configuration](../configuration.md);
what they are on your machine, and why: `thermocline config`.

Every setting has a variable, too: `engine.hot_bytes` is `THERMOCLINE_ENGINE__HOT_BYTES`. The ones
with a flag have it in `thermocline serve`; any other is set by `--set NAME=VALUE`.
"""


def settings_page() -> str:
    fields = Fields(Settings)
    values = flat(Settings())
    flags = {setting: flag for flag, setting in FLAGS.items()}
    parts = [INTRODUCTION]
    for section in ["", *fields.sections]:
        rows = [
            (
                code(name),
                _takes(name, kind),
                _default(name, values[name]),
                code(flags.get(name, "")),
            )
            for name, kind in fields.types.items()
            if name.rpartition(".")[0] == section
        ]
        parts.append(f"## {code(section) or 'Top level'}")
        parts.append(table(("setting", "takes", "default", "flag"), rows))
    return page("Settings", *parts)


def _default(name: str, value: object) -> str:
    text = {"True": "true", "False": "false", "None": ""}.get(str(value), shown(name, value))
    return code(text)


def _takes(name: str, kind: Type) -> str:
    if name.endswith("_bytes"):
        return "a size" + _bounds(name, kind)
    if name.endswith("_s"):
        return "a time" + _bounds(name, kind)
    match kind:
        case BoolType():
            return "`true`, `false`"
        case IntType():
            return "a whole number" + _bounds(name, kind)
        case FloatType():
            return "a number" + _bounds(name, kind)
        case LiteralType(values):
            return ", ".join(code(str(x)) if x else "nothing" for x in values)
        case VarTupleType():
            return "a list"
        case UnionType(types):
            return " or ".join(
                "nothing" if isinstance(x, NoneType) else _takes(name, x) for x in types
            )
    return "text"


def _bounds(name: str, kind: Type) -> str:
    return "".join(f", {words}" for words in _bound_words(name, kind))


def _bound_words(name: str, kind: Type) -> Iterator[str]:
    if not isinstance(kind, IntType | FloatType):
        return
    for words, bound in (
        ("at least", kind.ge),
        ("more than", kind.gt),
        ("at most", kind.le),
        ("less than", kind.lt),
    ):
        # That a number is not negative goes without saying.
        if bound is not None and not (bound == 0 and words == "at least"):
            yield f"{words} {shown(name, bound)}"
    if kind.multiple_of:
        yield f"a multiple of {shown(name, kind.multiple_of)}"
