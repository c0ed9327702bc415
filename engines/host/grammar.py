"""Grammars of answers: their text, and their compilation by llguidance.

A grammar holds calls of given functions, JSON that obeys a schema, or a text of a given form. The
language is llguidance's Lark, in which every schema is a grammar of its own. Neither mlx nor
anything of the engine is imported here: the process that tries grammars out is to be small.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import llguidance
import llguidance.numpy as bitmasks
import msgspec
import numpy as np
from llguidance import LLMatcher

from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json, ResponseFormat, Tool
from engines.openai.schemas.enforceable import enforceable
from engines.openai.schemas.keywords import read_schema

# Between two lines of calls lies a line break; so there is none inside a call.
_MAX_CALLS: Final = 8
_IN_CALLS: Final = {"whitespace_pattern": " ?", "coerce_one_of": True}
# Bounded: a small model left free to indent may never stop doing so.
_IN_ANSWERS: Final = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}", "coerce_one_of": True}
# Where schemas stand inside a schema: values of other keys may look like one and be none.
_ONE_SCHEMA: Final = frozenset({"items"})
_MANY_SCHEMAS: Final = frozenset({"properties", "$defs", "definitions"})
_LISTED_SCHEMAS: Final = frozenset({"anyOf", "oneOf", "prefixItems"})
# Keywords that hold beside an object's own, and those.
_JOINED: Final = frozenset({"$ref", "anyOf", "oneOf"})
_OWN: Final = frozenset({"properties", "required"})
# An object that has one of these says itself what else it may have.
_OPENING: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf"}
)
# Some kilobytes each, made while an answer is written; llguidance would make 250,000.
MAX_LEXER_STATES: Final = 20_000
# The seconds of a core that it may take to find out which tokens may come next.
MAX_MASK_S: Final = 0.1
TRIED_TOKENS: Final = 8
# All answers wait while a mask is made, so one may take this much of a core for nothing, and an
# answer's masks together so many seconds more.
FREE_MASK_S: Final = 0.02
MAX_MASKS_S: Final = 2.0
# Above this the one schema at fault is not searched: that means compiling them all again.
_MAX_BLAMED_CHARS: Final = 1 << 17
LIMITS: Final = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
_XGRAMMARS_PLACE: Final = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")  # a time, and a line of its code
TOO_MUCH: Final = "it is too large or too complex"


class GrammarWish(NamedTuple):
    """The calls and the answer that a grammar is to allow.

    ``many``: several calls may follow one another. ``answer``: the JSON schema of an answer without
    calls; ``rule``: such an answer as a rule of Lark's. Neither = there must be a call.
    """

    tools: Sequence[Tool]
    many: bool
    answer: Json | None
    rule: str = ""
    field: str = "response_format"  # that asks for the answer

    @property
    def param(self) -> str:
        """The request's field that asks for it."""
        return self.field if self.answer is not None or self.rule else "tools"


class OneSchema(msgspec.Struct, frozen=True):
    """A schema of a grammar by itself, to find the one that is wrong."""

    param: str
    schema: Json
    options: Json


class GrammarSource(msgspec.Struct, frozen=True):
    """A grammar as text, and the schemas that went into it."""

    text: str
    param: str
    schemas: list[OneSchema]


def answer_schema(wanted: ResponseFormat | None) -> Json | None:
    """The JSON schema that a response_format asks for; None for plain text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        return {"type": "object"}
    return wanted.json_schema.schema


def wish_for(form: ResponseFormat | None, outputs: Json | None) -> GrammarWish | None:
    """Return the wish for an answer without calls; None if it may be any text.

    Args:
        outputs: vLLM's own field, ``structured_outputs``.

    Raises:
        InvalidRequest: there are two forms, or one that only vLLM knows; names the field.
    """
    schema = answer_schema(form)
    asked = {name: value for name, value in (outputs or {}).items() if value not in (None, False)}
    if not asked:
        return None if schema is None else GrammarWish([], False, schema)
    name, value = next(iter(asked.items()))
    field = f"structured_outputs.{name}"
    if schema is not None or len(asked) > 1:
        raise InvalidRequest(f"{field}: an answer is held to one thing only", field)
    match name, read_schema(value) if name == "json" else value:
        case "json", dict() as schema:
            return GrammarWish([], False, schema, field=field)
        case "json_object", True:
            return GrammarWish([], False, {"type": "object"}, field=field)
        case "regex", str() as pattern if pattern:
            return GrammarWish([], False, None, pattern_rule(pattern), field)
        case "choice", [str(), *_] as texts if all(isinstance(x, str) and x for x in texts):
            return GrammarWish([], False, None, " | ".join(map(json.dumps, texts)), field)
    raise InvalidRequest(f"{field}: this engine cannot do that: leave it out", field)


def pattern_rule(pattern: str) -> str:
    """Write a pattern that an answer has to match as a whole as a rule of Lark's."""
    grammar = json.loads(llguidance.grammar_from("regex", pattern))["grammars"][0]
    return str(grammar["lark_grammar"]).removeprefix("start: ")


def call_header(name: str) -> str:
    """The beginning of a function's call; its arguments, a JSON object, and ``}`` follow."""
    return f'{{"name": {json.dumps(name)}, "arguments": '


def arguments_schema(tool: Tool) -> Json:
    """The JSON schema of a function's arguments; without parameters, of an empty object.

    Clients write a function without parameters as ``properties: {}``, too.
    """
    given = tool.function.parameters or {"properties": {}}
    opens = (_OPENING | {"allOf"}) & given.keys() or given.get("required")
    if given.get("properties") == {} and not opens:
        given = {**given, "additionalProperties": False}
    return {"type": "object", **given}


def source_of(wish: GrammarWish) -> GrammarSource:
    """Write a grammar: calls of functions, one a line, or JSON of an answer.

    Every schema is a grammar of its own, so ``$ref`` keeps pointing into its own root.
    """
    tools, many, answer, rule, field = wish
    starts = ["calls"] if tools else []
    rules, schemas = [], []
    if tools:
        more = f' ("\\n" call){{0,{_MAX_CALLS - 1}}}' if many else ""
        rules.append(f"calls: call{more}")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        schema = OneSchema(f"tools[{i}].function.parameters", arguments_schema(tool), _IN_CALLS)
        schemas.append(schema)
        rules.append(f'call_{i}: {json.dumps(call_header(tool.function.name))} args_{i} "}}"')
        rules.append(f"args_{i}: {_embedded(schema)}")
    if answer is not None:
        schemas.append(OneSchema(field, answer, _IN_ANSWERS))
        rule = _embedded(schemas[-1])
    if rule:
        starts.append("answer")
        rules.append(f"answer: {rule}")
    text = "\n".join([f"start: {' | '.join(starts)}", *rules])
    return GrammarSource(text, wish.param, schemas)


def _embedded(schema: OneSchema) -> str:
    written = enforceable(closed(schema.schema))
    return "%json " + json.dumps({**written, "x-guidance": schema.options})


def closed(schema: Json) -> Json:
    """Close every object that names its properties and does not say whether it has more.

    A weak model adds properties without end where it may. Schemas of which several hold for one
    object stay as they are: a part that is closed would refuse the other's properties.
    """
    if _joins(schema):
        return schema
    shut: Json = _closed(schema)
    return shut


def _joins(node: Any) -> bool:
    """Say whether an object may have to obey several schemas that name properties."""
    if isinstance(node, list):
        return any(_joins(x) for x in node)
    if not isinstance(node, dict):
        return False
    parts = [key for key in _JOINED & node.keys() if _names_properties(key, node[key])]
    if "allOf" in node or len(parts) > 1 or (parts and _OWN & node.keys()):
        return True
    return any(_joins(x) for x in node.values())


def _names_properties(key: str, value: Any) -> bool:
    if key == "$ref":
        return True
    branches = [x for x in value if isinstance(x, dict)] if isinstance(value, list) else []
    return any(x.keys() & (_JOINED | {"properties", "allOf"}) for x in branches)


def _closed(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    shut = dict(node)
    for key in _ONE_SCHEMA & node.keys():
        shut[key] = _closed(node[key])
    for key in _MANY_SCHEMAS & node.keys():
        if isinstance(node[key], dict):
            shut[key] = {name: _closed(x) for name, x in node[key].items()}
    for key in _LISTED_SCHEMAS & node.keys():
        if isinstance(node[key], list):
            shut[key] = [_closed(x) for x in node[key]]
    if _is_closable(node):
        shut["additionalProperties"] = False
    return shut


def _is_closable(node: Json) -> bool:
    named, required = node.get("properties"), node.get("required", [])
    if not isinstance(named, dict) or not named or _OPENING & node.keys():
        return False
    return isinstance(required, list) and all(x in named for x in required)


class Verdict(msgspec.Struct, frozen=True):
    """The outcome of a trial. ``reason`` says why a grammar cannot be enforced; "" if it can be."""

    reason: str = ""
    param: str = ""  # the field at fault
    nbytes: int = 0  # that the compiled grammar takes
    is_final: bool = True  # False: the machine is at fault, so that it may be asked again


def new_matcher(tokenizer: llguidance.LLTokenizer, text: str) -> LLMatcher:
    """Compile a grammar. What is wrong with it stands in ``get_error()``."""
    source = LLMatcher.grammar_from_lark(text)
    return LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)


def tried(tokenizer: llguidance.LLTokenizer, source: GrammarSource, width: int) -> Verdict:
    """Compile a grammar, and take the first steps of an answer.

    Args:
        width: of the mask of the tokens that may come next.
    """
    matcher = new_matcher(tokenizer, source.text)
    if matcher.is_error():
        if len(source.text) <= _MAX_BLAMED_CHARS:
            for schema in source.schemas:
                if reason := _schema_error(schema, tokenizer):
                    return Verdict(f"the JSON schema cannot be enforced: {reason}", schema.param)
        reason = reason_of(matcher.get_error())
        return Verdict(f"cannot be enforced: {reason}", source.param)
    if reason := first_steps(matcher, width):
        return Verdict(f"cannot be enforced: {reason}", source.param)
    return Verdict()


def first_steps(matcher: LLMatcher, width: int) -> str:
    """Write the beginning of some answer; return what is wrong with it, "" if nothing is."""
    bits = bitmasks.allocate_token_bitmask(1, width)
    for step in range(TRIED_TOKENS):
        begin = time.thread_time()
        bitmasks.fill_next_token_bitmask(matcher, bits)
        if time.thread_time() - begin > MAX_MASK_S:
            return TOO_MUCH
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        if matcher.is_error():
            return reason_of(matcher.get_error())
        if not allowed.size or matcher.is_stopped():
            return ""
        matcher.consume_token(int(allowed[step % allowed.size]))
    return ""


def _schema_error(schema: OneSchema, tokenizer: llguidance.LLTokenizer) -> str:
    try:
        text = json.dumps(enforceable(closed(schema.schema)))
        source = LLMatcher.grammar_from_json_schema(text, overrides=schema.options)  # type: ignore[arg-type]
    except ValueError as error:
        return reason_of(str(error))
    found = LLMatcher.validate_grammar(source, tokenizer, limits=LIMITS)
    return reason_of(found) if found else ""


def reason_of(error: str) -> str:
    """Return a compiler's error in a line, without its state; a panic is no sentence of it."""
    if "NoExtensionBias" in error or "stack level exceeded" in error:
        return "it describes no value: a $ref leads back to itself, or all choices are impossible"
    if "panic" in error or "backtrace" in error:
        return TOO_MUCH
    said = _XGRAMMARS_PLACE.sub("", error.partition("<state>")[0])
    return " ".join(said.split())[:500] or TOO_MUCH
