"""Writes a JSON schema as a compiler can enforce it, and reports the keywords that are left out.

A grammar defines which characters may come next, so it cannot express a keyword that depends on the
whole value, or excludes names or texts. Without such a keyword, an answer still obeys all others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from engines.openai.messages import Json
from engines.openai.schemas.numbers import (
    holds_number,
    includes_its_bound,
    is_enforceable_number,
    sendable,
)
from engines.openai.schemas.one_of import Branches
from engines.openai.schemas.patterns import in_calls, in_rust, is_plain, is_plain_in_calls
from engines.openai.schemas.refs import ANNOTATIONS, DEFINITIONS, VALUES, Refs, escaped
from engines.openai.schemas.well_formed import Path, well_formed
from engines.openai.schemas.xgrammar_keywords import (
    BESIDE,
    LENGTHS,
    conflates,
    ignored_in_calls,
    written_out,
)

_UNKNOWN: Final = frozenset(
    {"contains", "minContains", "maxContains", "uniqueItems", "propertyNames", "not"}
    | {"if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"}
    | {"unevaluatedItems", "unevaluatedProperties"}
    | {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}
)
# Keywords that may name properties that no other keyword of the object names.
_NAMING: Final = frozenset(
    {"if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"}
)
_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# llguidance's grammar of these formats requires an offset from UTC. zod also writes a pattern for
# times without one, and no text obeys both; so the format is left out, in strict schemas, too.
_OFFSET: Final = ("time", "date-time")
_ENDS_IN_OFFSET: Final = re.compile(r"(?:[zZ]|[+-]\d\d:\d\d)$")
# Values with which a keyword has no effect; such a keyword is left out without a report.
_NOTHING: Final[dict[str, tuple[object, ...]]] = {
    "uniqueItems": (False,),
    "minProperties": (0,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}
# Keywords beside which ``unevaluatedProperties`` differs from ``additionalProperties``.
_APPLYING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", *_NAMING, "not", "$dynamicRef"})
# Without one of these keywords, adding ``additionalProperties`` makes xgrammar require an object.
_OF_OBJECTS: Final = frozenset(
    {"type", "properties", "patternProperties", "additionalProperties", "required"}
)
_NAMED: Final = frozenset({"properties", "patternProperties", *DEFINITIONS})
# Keywords whose schemas are left out, or written under another keyword.
_LOST: Final = _UNKNOWN | ANNOTATIONS | {"oneOf", "patternProperties"}
# Schemas with one of these get a unique mark if xgrammar might confuse them with others.
_MARKED: Final = frozenset({"properties", "const", "enum"})
_CHOICES: Final = frozenset({"allOf", "anyOf", "oneOf"})
# Beside a recursive ref, llguidance allows only these keywords.
_BESIDE_CIRCLES: Final = frozenset(
    {"$ref", *DEFINITIONS, "$id", "$anchor", "title", "description", "readOnly", "$comment"}
)
_LITERAL: Final = re.compile(r"\^((?:[\w/:@ -]|\\[-./_])+)(?![*?{|])")  # a literal prefix of names
# On vLLM, xgrammar enforces the schemas of calls; llguidance those of answers, and all on mlx.
Compiler: TypeAlias = Literal["llguidance", "xgrammar"]


class LeftOut(NamedTuple):
    """A keyword of a schema that its grammar lacks."""

    path: Path
    keyword: str
    spared: bool = False  # a strict schema may have it nevertheless


Report: TypeAlias = Callable[[LeftOut], None]


def enforceable(
    schema: Json, compiler: Compiler = "llguidance", report: Report = lambda left: None
) -> Json:
    """Return a copy of a schema without the keywords that cannot be enforced."""
    formed = well_formed(schema)
    made: Json = _SchemaWriter(formed, compiler, report).written(formed, ())
    return made


class _SchemaWriter:
    """Writes the parts of one schema."""

    def __init__(self, root: Json, compiler: Compiler, report: Report) -> None:
        self._branches = Branches(root)
        self._refs = Refs(root, _LOST)
        self._in_calls = compiler == "xgrammar"
        self._reads = is_plain_in_calls if self._in_calls else is_plain
        self._report = report
        self._marks = self._in_calls and conflates(self._refs.nodes)
        self._num_marked = 0

    def written(self, node: Any, path: Path) -> Any:
        """Return an enforceable copy of a part of the schema."""
        if isinstance(node, list):
            return [self.written(x, (*path, str(i))) for i, x in enumerate(node)]
        if not isinstance(node, dict):
            return node
        is_circular = not self._in_calls and self._is_circular(node)
        node = _without_closing(node)
        if _has_no_offset(node, self._reads):
            self._report(LeftOut(path, "format", spared=True))
            node = {key: value for key, value in node.items() if key != "format"}
        if self._in_calls:
            node = written_out(node)
            for keyword in ignored_in_calls(node):
                self._report(LeftOut(path, keyword))
        elif is_circular:
            node = self._without_siblings(node, path)
        made: Json = {}
        for key, value in node.items():
            made |= self._keyword(key, value, node, path)
        if self._marks and _MARKED & made.keys():
            self._num_marked += 1
            made["x-at"] = str(self._num_marked)
        if _OF_OBJECTS & made.keys() and _may_have_other_names(node, made):
            made["additionalProperties"] = made.get("additionalProperties") or True
        return made

    def _keyword(self, key: str, value: Any, node: Json, path: Path) -> Json:
        """Return a keyword of a node in enforceable form; {} if it is left out."""
        if key in ANNOTATIONS or _means_nothing(key, node):
            return {}
        if key == "required" and (possible := _possible(node)) is not None:
            self._report(LeftOut(path, key))
            return {key: possible}
        if key in VALUES:
            return self._values(key, value, path)
        if key in _NAMED and isinstance(value, dict):
            return {key: self._named(key, value, node, path)}
        if key == "$ref" and isinstance(value, str):
            follow = self._refs.for_xgrammar if self._in_calls else self._refs.for_llguidance
            ref = follow(value)
            return {key: ref} if ref else self._left_out(path, key)
        if key == "pattern" and isinstance(value, str) and self._reads(value):
            return {key: self._pattern(value)}
        if self._in_calls and key in LENGTHS:
            return self._left_out(path, key, spared=True)
        if self._in_calls and key in _CHOICES and BESIDE & node.keys():
            return {}  # reported as ignored already; beside it, xgrammar would ignore the rest
        if key == "oneOf" and isinstance(value, list):
            return self._one_of(value, node, path)
        if includes_its_bound(key, node):
            self._report(LeftOut(path, key))
            return {key.replace("exclusiveM", "m"): value}
        if self._is_enforceable(key, value, node):
            return {key: self.written(value, (*path, key))}
        return {} if value in _NOTHING.get(key, ()) else self._left_out(path, key)

    def _left_out(self, path: Path, key: str, *, spared: bool = False) -> Json:
        self._report(LeftOut(path, key, spared))
        return {}

    def _values(self, key: str, value: Any, path: Path) -> Json:
        try:
            return {key: sendable(value)}
        except OverflowError:
            return self._left_out(path, key)

    def _named(self, key: str, schemas: Json, node: Json, path: Path) -> Json:
        if key == "patternProperties":
            return self._named_by_pattern(schemas, node, path)
        is_escaped = key in DEFINITIONS and self._in_calls
        return {
            escaped(name) if is_escaped else name: self.written(x, (*path, key, name))
            for name, x in schemas.items()
        }

    def _named_by_pattern(self, schemas: Json, node: Json, path: Path) -> Json:
        """Return ``patternProperties``, limited to patterns of which no name matches two."""
        key = "patternProperties"
        held = [x for x in schemas if self._reads(x)]
        begins = sorted(found[1] for x in held if (found := _LITERAL.match(x)))
        differ = len(begins) == len(held) and not any(y.startswith(x) for x, y in pairwise(begins))
        if len(held) > 1 and (self._in_calls or not differ):
            held = []
        if self._in_calls and "properties" in node:
            held = []  # xgrammar would allow other names, too
        if len(held) < len(schemas):
            self._report(LeftOut(path, key))
        return {self._pattern(x): self.written(schemas[x], (*path, key, x)) for x in held}

    def _is_circular(self, node: Json) -> bool:
        """Return whether a node's ref, or that of one of its branches, is recursive."""
        parts = [x for key in _CHOICES if isinstance(node.get(key), list) for x in node[key]]
        refs = [x for x in (node, *parts) if isinstance(x, dict) and isinstance(x.get("$ref"), str)]
        return any(map(self._refs.leads_back, refs))

    def _without_siblings(self, node: Json, path: Path) -> Json:
        """Return a node without the keywords beside its recursive ref or choice of refs."""
        kept = next(x for x in ("$ref", "anyOf", "oneOf", "allOf") if x in node)
        for key in node.keys() & (BESIDE | _UNKNOWN | LENGTHS | {"type", *_CHOICES}) - {kept}:
            if node[key] not in _NOTHING.get(key, ()):
                self._report(LeftOut(path, key))
        made = {key: value for key, value in node.items() if key in {*_BESIDE_CIRCLES, kept}}
        if kept == "allOf" and len(node[kept]) > 1:
            self._report(LeftOut(path, kept))
            made[kept] = [x for x in node[kept] if isinstance(x, dict) and "$ref" in x][:1]
        return made

    def _one_of(self, branches: list[Any], node: Json, path: Path) -> Json:
        if not self._branches.exclude_each_other(node):
            self._report(LeftOut(path, "oneOf"))
        # vLLM's check of a request refuses ``oneOf`` beside others that it knows.
        key = "oneOf" if "anyOf" in node else "anyOf"
        return {key: self.written(branches, (*path, "oneOf"))}

    def _pattern(self, pattern: str) -> str:
        return in_rust(pattern) if not self._in_calls else in_calls(pattern) or pattern

    def _is_enforceable(self, key: str, value: object, node: Json) -> bool:
        if key in _UNKNOWN:
            return False
        if key in ("format", "pattern") and isinstance(value, str):
            # It has no effect unless the value may be text, or all compilers support it.
            return not _may_be_text(node) or (key == "format" and value in _FORMATS)
        if isinstance(value, int | float) and not is_enforceable_number(
            key, value, node, self._in_calls
        ):
            return False
        return key not in ("minProperties", "maxProperties") or holds_number(key, value, node)


def _may_have_other_names(node: Json, made: Json) -> bool:
    """Return whether keywords that were left out of an object may name further properties."""
    patterns = "patternProperties"
    return (
        bool(_NAMING & node.keys())
        or ("$ref" in node and "$ref" not in made)
        or bool(_CHOICES & node.keys() and not _CHOICES & made.keys())
        or (isinstance(made.get(patterns), dict) and len(made[patterns]) < len(node[patterns]))
    )


def _possible(node: Json) -> list[object] | None:
    """Return the required names that a closed object can have; None if it can have all."""
    named, needed = node.get("properties", {}), node["required"]
    if node.get("additionalProperties") is not False or "patternProperties" in node:
        return None
    if not (isinstance(named, dict) and isinstance(needed, list)):
        return None
    found = [x for x in needed if x in named]
    return found if len(found) < len(needed) else None


def _means_nothing(key: str, node: Json) -> bool:
    """Return whether a keyword has no effect, but makes compilers ignore others.

    ``$schema`` names a draft, and llguidance ignores the keywords of later drafts;
    ``additionalItems`` applies only beside a list of ``items``, and makes it ignore
    ``prefixItems``; an ``$id`` may be no address.
    """
    if key == "additionalItems":
        return not isinstance(node.get("items"), list)
    return key == "$schema" or (key == "$id" and not _is_address(node[key]))


def _is_address(value: object) -> bool:
    try:
        return isinstance(value, str) and "#" not in value and bool(urlsplit(value).path)
    except ValueError:
        return False


def _without_closing(node: Json) -> Json:
    """Return a node with ``unevaluatedProperties`` renamed, if it acts as the additional ones."""
    if "unevaluatedProperties" not in node or (_APPLYING | {"additionalProperties"}) & node.keys():
        return node
    return {
        "additionalProperties" if key == "unevaluatedProperties" else key: value
        for key, value in node.items()
    }


def _has_no_offset(node: Json, reads: Callable[[str], bool]) -> bool:
    """Return whether the values or the pattern of a time certainly allow no offset from UTC."""
    if node.get("format") not in _OFFSET or not _may_be_text(node):
        return False
    values = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(values, list):
        return not any(isinstance(x, str) and _ENDS_IN_OFFSET.search(x) for x in values)
    pattern = node.get("pattern")
    return isinstance(pattern, str) and "Z" not in pattern and reads(pattern)


def _may_be_text(node: Json) -> bool:
    kind = node.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)
