"""Keywords of JSON schemas that no compiler here knows: left out and named, or refused if strict.

A grammar says which characters may come next, so a keyword that looks at the whole value, or that
excludes names or texts, has no place in it. Without such a keyword an answer still obeys all the
others. A client that says ``strict`` wants all of them or a refusal, as OpenAI does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from engines.openai.errors import FieldError, InvalidRequest
from engines.openai.messages import Json, NamedTool, ResponseFormat, Tool
from engines.openai.schemas.numbers import holds_number, is_enforceable_number, sendable
from engines.openai.schemas.one_of import Branches
from engines.openai.schemas.patterns import in_calls, in_rust, is_plain, is_plain_in_calls
from engines.openai.schemas.refs import (
    ANNOTATIONS,
    DEFINITIONS,
    VALUES,
    Refs,
    endless_ref,
    escaped,
)
from engines.openai.schemas.vllm_check import passing
from engines.openai.schemas.well_formed import Path, misfits, well_formed, with_well_formed_tools
from engines.openai.schemas.xgrammar_keywords import (
    BESIDE,
    LENGTHS,
    ignored_in_calls,
    written_out,
)

_UNKNOWN: Final = frozenset(
    {"contains", "minContains", "maxContains", "uniqueItems", "propertyNames", "not"}
    | {"if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"}
    | {"unevaluatedItems", "unevaluatedProperties"}
    | {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}
)
# Keywords that may name properties which no other keyword of an object does.
_NAMING: Final = frozenset(
    {"if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"}
)
_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# The grammar of these wants an offset from UTC; zod writes a pattern for times without one, too,
# and no text obeys both: the pattern says more, so the format goes, of strict schemas as well.
_OFFSET: Final = ("time", "date-time")
_ENDS_IN_OFFSET: Final = re.compile(r"(?:[zZ]|[+-]\d\d:\d\d)$")
# Those that ask for nothing are left out in silence.
_NOTHING: Final[dict[str, tuple[object, ...]]] = {
    "uniqueItems": (False,),
    "minProperties": (0,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}
# Keywords beside which ``unevaluatedProperties`` is more than ``additionalProperties``.
_APPLYING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", *_NAMING, "not", "$dynamicRef"})
# Without one of these, ``additionalProperties`` make it an object for xgrammar.
_OF_OBJECTS: Final = frozenset(
    {"type", "properties", "patternProperties", "additionalProperties", "required"}
)
_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})


class LeftOut(NamedTuple):
    """A keyword that a grammar does not have."""

    path: Path
    keyword: str
    spared: bool = False  # a strict schema may have it, since others of its keywords say more


Report: TypeAlias = Callable[[LeftOut], None]
Reads: TypeAlias = Callable[[str], bool]  # says whether a compiler can hold a text to a pattern


class HeldSchema(NamedTuple):
    """A JSON schema to which an answer is held."""

    field: str  # of the request
    name: str  # as OpenAI's errors name it
    schema: Json
    strict: bool
    of_call: bool = False  # the arguments of one, and no answer
    on_mlx_only: bool = False  # others hold an answer to its format alone, or to nothing
    on_vllm: bool = False  # which holds calls by another compiler than answers, and checks both

    def check(self) -> None:
        """Refuse what cannot be left out. Raises ``FieldError``."""
        if self.on_mlx_only:
            return  # its compiler says it
        if ref := endless_ref(self.schema):
            raise FieldError(
                self.field,
                f"Invalid schema for {self.name}: the $ref {ref[:100]!r} leads back to itself, so"
                " it describes no value: let it refer to a schema of its own",
            )
        if self.strict:
            for misfit in misfits(self.schema):
                raise FieldError(
                    self.field,
                    f"Invalid schema for {self.name}: in context={misfit.path!r}, {misfit.words},"
                    " which strict does not permit: mend it, or set strict to false",
                )
            for path, keyword, spared in self._left_out():
                if not spared:
                    raise FieldError(
                        self.field,
                        f"Invalid schema for {self.name}: in context={path!r}, {keyword!r} is not"
                        " permitted with strict: leave it out, or set strict to false",
                    )

    @property
    def left_out(self) -> set[str]:
        """The keywords that its grammar does not have."""
        found = {left.keyword for left in self._left_out()}
        return found | {misfit.keyword for misfit in misfits(self.schema)}

    def _left_out(self) -> list[LeftOut]:
        found: list[LeftOut] = []
        reads = is_plain_in_calls if self.on_vllm and self.of_call else is_plain
        enforceable(self.schema, reads, found.append)
        return found


def held_formats(form: ResponseFormat | None, outputs: Json | None) -> list[HeldSchema]:
    """List the schemas of a request's ``response_format`` and ``structured_outputs``."""
    found = []
    named = form.json_schema if form is not None else None
    if named is not None and named.schema is not None:
        name = f"response_format {named.name!r}"
        found.append(HeldSchema("response_format", name, named.schema, bool(named.strict)))
    if isinstance(schema := read_schema((outputs or {}).get("json")), dict):
        found.append(HeldSchema("structured_outputs.json", "structured_outputs", schema, False))
    return found


def held_tools(
    tools: Sequence[Tool],
    choice: Literal["none", "auto", "required"] | NamedTool | None,
    beside_format: bool,
) -> list[HeldSchema]:
    """List the schemas of functions that are strict, or whose call is forced.

    Args:
        beside_format: of an answer; then mlx holds all calls that may come in its place.
    """
    if choice == "none":
        return []
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return [
        HeldSchema(
            f"tools[{i}].function.parameters",
            f"function {tool.function.name!r}",
            tool.function.parameters,
            bool(tool.function.strict),
            of_call=True,
            on_mlx_only=not (tool.function.strict or choice == "required" or named is not None),
        )
        for i, tool in enumerate(tools)
        if tool.function.parameters is not None
        and (
            tool.function.strict
            or choice == "required"
            or tool.function.name == named
            or (beside_format and named is None)
        )
    ]


def left_out(schemas: Iterable[HeldSchema], engine: str) -> list[str]:
    """List the keywords that the grammars of checked schemas do not have at an engine.

    Raises:
        InvalidRequest: a strict one has such a keyword.
    """
    on_vllm = engine == "vllm"
    held = [x._replace(on_vllm=on_vllm) for x in schemas if engine == "mlx" or not x.on_mlx_only]
    try:
        for schema in held if on_vllm else ():
            schema.check()
    except FieldError as error:
        raise InvalidRequest(f"{error.field}: {error}", error.field) from error
    return sorted({keyword for schema in held for keyword in schema.left_out})


def read_schema(schema: object) -> object:
    """Return a schema that was sent as text as an object; what is no JSON, as it is."""
    if isinstance(schema, str):
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(schema)
    return schema


def with_known_keywords(
    raw: Json, held: Iterable[HeldSchema], engine: str
) -> tuple[Json, list[str]]:
    """Return the fields of a checked body that hold schemas, as they can be used there.

    Returns the keywords that they lose as well; see ``left_out``.
    """
    tools, misplaced = with_well_formed_tools(raw)
    keywords = misplaced.union(left_out(held, engine))
    return {**tools, **with_enforceable_formats(raw, engine)}, sorted(keywords)


def with_enforceable_formats(raw: Json, engine: str) -> Json:
    """Return the fields of a checked body that hold its answer's schema, as it can be enforced."""
    made: Json = {}

    def written(schema: Json) -> Json:
        known = enforceable(schema)
        return passing(known) if engine == "vllm" else known

    form, outputs = raw.get("response_format") or {}, raw.get("structured_outputs") or {}
    named = form.get("json_schema") or {}
    if isinstance(schema := named.get("schema"), dict):
        made["response_format"] = {**form, "json_schema": {**named, "schema": written(schema)}}
    if isinstance(schema := read_schema(outputs.get("json")), dict):
        made["structured_outputs"] = {**outputs, "json": written(schema)}
    return made


def enforceable(schema: Json, reads: Reads = is_plain, report: Report = lambda left: None) -> Json:
    """Return a copy of a schema without the keywords that cannot be enforced."""
    formed = well_formed(schema)
    made: Json = _enforceable(formed, (), _Walk(Branches(formed), Refs(formed), reads, report))
    return made


class _Walk(NamedTuple):
    """The things that stay the same on a way through a schema."""

    branches: Branches
    refs: Refs
    reads: Reads
    report: Report

    @property
    def is_of_call(self) -> bool:
        """True for the arguments of a call at vLLM."""
        return self.reads is is_plain_in_calls

    def written(self, pattern: str) -> str:
        """Write a pattern that can be enforced for the compiler that does so."""
        return in_rust(pattern) if not self.is_of_call else in_calls(pattern) or pattern

    def ref(self, ref: str) -> str | None:
        """Write a ref for it; None if it leads nowhere."""
        return self.refs.for_xgrammar(ref) if self.is_of_call else self.refs.for_llguidance(ref)

    def name(self, keyword: str, name: str) -> str:
        """Write what a keyword names."""
        if keyword == "patternProperties":
            return self.written(name)
        return escaped(name) if keyword in DEFINITIONS and self.is_of_call else name


def _enforceable(node: Any, path: Path, walk: _Walk) -> Any:
    if isinstance(node, list):
        return [_enforceable(x, (*path, str(i)), walk) for i, x in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if _has_no_offset(node, walk.reads):
        walk.report(LeftOut(path, "format", spared=True))
        node = {key: value for key, value in node.items() if key != "format"}
    if walk.is_of_call:
        node = written_out(node)
        for keyword in ignored_in_calls(node):
            walk.report(LeftOut(path, keyword))
    made: Json = {}
    is_open = bool(_NAMING & node.keys())  # its other keywords do not name all its properties
    for key, value in _without_closing(node).items():
        if key == "required" and (needed := _possible(node)) is not None:
            made[key] = needed
            walk.report(LeftOut(path, key))
        elif key in ANNOTATIONS:
            continue
        elif key in VALUES:
            try:
                made[key] = sendable(value)
            except OverflowError:
                walk.report(LeftOut(path, key))
        elif key == "$ref" and isinstance(value, str):
            if ref := walk.ref(value):
                made[key] = ref
            else:
                walk.report(LeftOut(path, key))
                is_open = True
        elif key in LENGTHS and walk.is_of_call:
            walk.report(LeftOut(path, key, spared=True))  # strict calls may have them all the same
        elif _means_nothing(key, node):
            continue
        elif walk.is_of_call and key == "allOf" and BESIDE & node.keys():
            continue  # named above; xgrammar would read nothing else
        elif key in _BY_NAME and isinstance(value, dict):
            named = {k: x for k, x in value.items() if key != "patternProperties" or walk.reads(k)}
            made[key] = {
                walk.name(key, k): _enforceable(x, (*path, key, k), walk) for k, x in named.items()
            }
            if len(named) < len(value):
                walk.report(LeftOut(path, key))
                is_open = True
        elif key == "oneOf" and isinstance(value, list):
            # vLLM's check of a request refuses the keyword beside others that it knows.
            made[key if "anyOf" in node else "anyOf"] = _enforceable(value, (*path, key), walk)
            if not walk.branches.exclude_each_other(node):
                walk.report(LeftOut(path, key))
        elif key == "pattern" and isinstance(value, str) and walk.reads(value):
            made[key] = walk.written(value)
        elif _is_enforceable(key, value, node, walk.reads):
            made[key] = _enforceable(value, (*path, key), walk)
        elif value not in _NOTHING.get(key, ()):
            walk.report(LeftOut(path, key))
    if is_open and _OF_OBJECTS & made.keys() and not made.get("additionalProperties"):
        made["additionalProperties"] = True
    return made


def _possible(node: Json) -> list[object] | None:
    """Return the required names that a closed object can have; None: it can have them all."""
    named, needed = node.get("properties", {}), node["required"]
    if node.get("additionalProperties") is not False or "patternProperties" in node:
        return None
    if not (isinstance(named, dict) and isinstance(needed, list)):
        return None
    found = [x for x in needed if x in named]
    return found if len(found) < len(needed) else None


def _means_nothing(key: str, node: Json) -> bool:
    """Say so of a keyword that constrains nothing, and for which compilers forget others.

    ``$schema`` names a draft, and llguidance ignores what later ones have; ``additionalItems`` goes
    with a list of ``items`` only, and for it ``prefixItems`` is ignored.
    """
    if key == "additionalItems":
        return not isinstance(node.get("items"), list)
    return key == "$schema"


def _without_closing(node: Json) -> Json:
    """Write ``unevaluatedProperties`` as ``additionalProperties`` where both mean the same."""
    if "unevaluatedProperties" not in node or (_APPLYING | {"additionalProperties"}) & node.keys():
        return node
    return {
        "additionalProperties" if key == "unevaluatedProperties" else key: value
        for key, value in node.items()
    }


def _is_enforceable(key: str, value: object, node: Json, reads: Reads) -> bool:
    if key in _UNKNOWN:
        return False
    if key in ("format", "pattern") and isinstance(value, str):
        if not _may_be_text(node):
            return True  # it is no text's, and means nothing
        return value in _FORMATS if key == "format" else reads(value)
    of_call = reads is is_plain_in_calls
    if isinstance(value, int | float) and not is_enforceable_number(key, value, node, of_call):
        return False
    return key not in ("minProperties", "maxProperties") or holds_number(key, value, node)


def _has_no_offset(node: Json, reads: Reads) -> bool:
    """Say whether a time's values or pattern leave no room for an offset, as far as can be seen."""
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
