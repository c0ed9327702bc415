"""Writes a JSON schema as a compiler can enforce it, and reports the keywords that are left out.

A keyword is left out if its value is malformed, as a ``type`` that does not exist, or if the
compiler does not hold it in that place (see ``keywords``). The other keywords still hold. A part
that is no schema allows any value. A keyword that is null constrains nothing.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from engines.openai.messages import Json
from engines.openai.schemas.keywords import (
    DEFINITIONS,
    FORMATS,
    JOINING,
    KEYWORDS,
    NOTHING,
    OWN,
    SPARED,
    have_type,
    is_about,
    types_of,
)
from engines.openai.schemas.refs import Refs, escaped, ref_to

Path: TypeAlias = tuple[str, ...]
# What reads the written schema: vLLM compiles calls with xgrammar; answers there, and everything on
# mlx, are compiled with llguidance. A chat template only shows it, but may fail at malformed parts.
Reader: TypeAlias = Literal["llguidance", "xgrammar", "template"]

_DEEPEST: Final = 128  # length of a path; ``schema_count`` refuses schemas that are as deep
_VALUES: Final = ("const", "enum")
_MARKED: Final = frozenset({"properties", *_VALUES})


class LeftOut(NamedTuple):
    """A keyword that was left out of a schema."""

    path: Path  # to the schema with the keyword, or to the value that is no schema
    keyword: str
    words: str = ""  # what is malformed about its value
    spared: bool = False  # True: a strict schema is not refused for it


Report: TypeAlias = Callable[[LeftOut], None]


def enforceable(
    schema: Json, reader: Reader = "llguidance", report: Report = lambda left: None
) -> Json:
    """Return a copy of a schema without the keywords that its reader cannot use."""
    made: Json = _SchemaWriter(schema, reader, report).written(schema, (), "")
    return made


class _SchemaWriter:
    """Writes the parts of one schema."""

    def __init__(self, root: Json, reader: Reader, report: Report) -> None:
        self._refs = Refs(root)
        self._in_calls = reader == "xgrammar"
        self._for_template = reader == "template"
        # xgrammar ignores what stands beside a ref or choices, llguidance in recursive schemas.
        self._reads_one = self._in_calls or (not self._for_template and self._refs.go_round)
        self._report = report
        self._num_marked = 0

    def written(self, node: Any, path: Path, keyword: str) -> Any:
        """Return a copy of a part as it can be enforced. ``keyword``: the one that contains it."""
        if isinstance(node, bool):
            if not self._in_calls or keyword in ("items", "additionalProperties"):
                return node
            if not node:  # xgrammar has no schema that allows no value
                self._report(LeftOut(path, keyword))
            return {}
        if not isinstance(node, dict) or len(path) > _DEEPEST:
            words = "" if isinstance(node, dict) else f"{_shown(node)} is not a JSON schema"
            if node is not None:
                self._report(LeftOut(path, keyword, words))
            return {}
        formed, lost = self._well_formed(node, path)
        if self._for_template:
            return {key: self._inner(key, value, path) for key, value in formed.items()}
        held = self._held(formed, path, lost)
        made = {key: self._inner(key, value, path) for key, value in held.items()}
        return self._completed(made, lost)

    def _well_formed(self, node: Json, path: Path) -> tuple[Json, set[str]]:
        """Return the well-formed keywords of a schema, and the names of the malformed ones."""
        formed: Json = {}
        lost = set()
        for key, value in _of_latest_draft(node).items():
            row = KEYWORDS.get(key)
            if row is None or (value is None and key != "const"):
                formed |= {key: value} if row is None else {}
                continue
            if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
                value = int(value)
            if row.has_form(value):
                formed[key] = value
            else:
                self._report(LeftOut(path, key, f"{key!r} cannot be {_shown(value)}"))
                lost.add(key)
        return formed, lost

    def _held(self, formed: Json, path: Path, lost: set[str]) -> Json:
        """Return the keywords of a schema that are held, and add the others to ``lost``."""
        known = {
            key: value
            for key, value in formed.items()
            if key in KEYWORDS
            and is_about(KEYWORDS[key], formed)
            and value not in NOTHING.get(key, ())
        }
        held = {key: x for key, x in known.items() if self._is_held(key, x, formed)}
        if "required" in held:
            held["required"] = self._possible(formed)
        read = held.keys() - _unread(held) if self._reads_one else held.keys()
        for key, value in known.items():
            if key not in read or held[key] != value:
                self._report(LeftOut(path, key, spared=_is_spared(key, value)))
                lost.add(key)
        return {key: held[key] for key in held if key in read}

    def _is_held(self, key: str, value: Any, formed: Json) -> bool:
        row = KEYWORDS[key]
        if key == "$ref" and self._refs.place(value) is None:
            return False
        return row.is_held(value, formed) and (not self._in_calls or row.in_calls(value, formed))

    def _possible(self, formed: Json) -> list[str]:
        """Return the required names that the compiler's grammar can have in an object."""
        is_closed = formed.get("additionalProperties") is False
        if not self._in_calls and (not is_closed or "patternProperties" in formed):
            return list(formed["required"])
        return [x for x in formed["required"] if x in formed.get("properties", {})]

    def _inner(self, key: str, value: Any, path: Path) -> Any:
        """Return a keyword's value with the schemas in it written."""
        inner = KEYWORDS[key].inner if key in KEYWORDS else ""
        if inner == "one":
            return self.written(value, (*path, key), key)
        if inner == "listed":
            return [self.written(x, (*path, key, str(i)), key) for i, x in enumerate(value)]
        if inner == "named":
            names = escaped if self._in_calls and key in DEFINITIONS else str
            return {names(x): self.written(y, (*path, key, x), key) for x, y in value.items()}
        if key == "pattern" and self._in_calls:  # xgrammar reads (ab+)? as if ``b`` were enough
            return re.sub(r"(?<!\\)\)\?", "){0,1}", value)
        if key == "$ref" and not self._for_template:
            place = self._refs.place(value)
            return value if place is None else ref_to(place, in_calls=self._in_calls)
        return value

    def _completed(self, made: Json, lost: set[str]) -> Json:
        """Return a written schema with what a compiler needs beside the client's keywords."""
        if "oneOf" in made and "anyOf" not in made:  # compilers treat both alike
            made = {"anyOf" if key == "oneOf" else key: value for key, value in made.items()}
        if self._in_calls:
            if {"prefixItems", "minItems", "maxItems"} & made.keys():
                made.setdefault("items", True)
            if _MARKED & made.keys():  # xgrammar may confuse two schemas that differ only in these
                self._num_marked += 1
                made["x-at"] = str(self._num_marked)
            elif "object" in types_of(made):  # xgrammar allows only an empty one
                made.setdefault("additionalProperties", True)
            if not KEYWORDS["additionalProperties"].in_calls(True, made):
                return made
        opened = {key for key in lost if KEYWORDS[key].opens}
        if opened and {"type", "properties", "additionalProperties", "required"} & made.keys():
            if is_about(KEYWORDS["properties"], made):
                made.setdefault("additionalProperties", True)
            if {"properties", "patternProperties"} & opened and "additionalProperties" in made:
                made["additionalProperties"] = True
        return made


def _shown(value: Any) -> str:
    return repr((value if isinstance(value, str) else reprlib.repr(value))[:40])


def _is_spared(key: str, value: Any) -> bool:
    return key in SPARED and (key != "format" or value in FORMATS)


def _unread(held: Json) -> set[str]:
    """Return the keywords that the compiler ignores, because it reads another one instead."""
    others = held.keys() - set(DEFINITIONS)
    for key in _VALUES:
        if key in held:
            values = held[key] if key == "enum" else [held[key]]
            return others - ({key, "type"} if have_type(values, held) else {key})
    joined = [x for x in JOINING if x in held and (x != "allOf" or len(held[x]) == 1)]
    if OWN & held.keys() or not joined:
        return others & set(JOINING)
    return others - {joined[0]}


def _of_latest_draft(node: Json) -> Json:
    """Return a schema with tuples and excluded bounds of older drafts in the latest one's form."""
    made = dict(node)
    if isinstance(node.get("items"), list) and "prefixItems" not in node:
        first, more = made.pop("items"), made.pop("additionalItems", None)
        made |= ({"prefixItems": first} if first else {}) | (
            {} if more is None else {"items": more}
        )
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(excludes := made.get(exclusive), bool):
            del made[exclusive]
            if excludes and bound in made:
                made[exclusive] = made.pop(bound)
    return made
