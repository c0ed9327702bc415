"""Grammars that constrain answers: their text, and their compilation by llguidance.

A grammar allows calls of given functions, JSON that obeys a schema, or a text of a given form. It
is written in llguidance's dialect of Lark, in which every schema is a grammar of its own. This
module imports neither mlx nor the rest of an engine, to keep the trial process small.
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
from engines.openai.schemas.held import read_schema

# A line break separates two calls, so a call contains none.
_MAX_CALLS: Final = 8
_IN_CALLS: Final = {"whitespace_pattern": " ?", "coerce_one_of": True}
# Bounded: a small model left free to indent may never stop doing so.
_IN_ANSWERS: Final = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}", "coerce_one_of": True}
# Keys whose values are schemas; values of other keys may look like a schema without being one.
_ONE_SCHEMA: Final = frozenset({"items"})
_MANY_SCHEMAS: Final = frozenset({"properties", "$defs", "definitions"})
_LISTED_SCHEMAS: Final = frozenset({"anyOf", "oneOf", "prefixItems"})
# Keywords that apply other schemas to the same object, and those that name its own properties.
_JOINED: Final = frozenset({"$ref", "anyOf", "oneOf"})
_OWN: Final = frozenset({"properties", "required"})
# A schema with one of these keywords states itself which other properties an object may have.
_OPENING: Final = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf"}
)
# States take some kilobytes each and are made while an answer is written; llguidance's own limit
# is 250,000.
MAX_LEXER_STATES: Final = 20_000
# CPU seconds that computing the mask of the next tokens may take.
MAX_MASK_S: Final = 0.1
TRIED_TOKENS: Final = 8
# All answers wait while a mask is computed. So each mask gets this many CPU seconds free, and the
# time beyond it, summed over an answer, may be at most ``MAX_MASKS_S``.
FREE_MASK_S: Final = 0.02
MAX_MASKS_S: Final = 2.0
# In a longer grammar the schema at fault is not searched for, since that compiles each again.
_MAX_BLAMED_CHARS: Final = 1 << 17
LIMITS: Final = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
# xgrammar's time and source line; the lines of our own grammar that llguidance quotes.
_PLACES: Final = re.compile(r"^\[[\d:]+\] \S+?:\d+: |^at \d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)
TOO_MUCH: Final = "it is too large or too complex"


class GrammarWish(NamedTuple):
    """The calls and the answer that a grammar shall allow.

    ``many``: several calls may follow one another. ``answer``: the JSON schema of an answer without
    calls; ``rule``: such an answer as a Lark rule instead. With neither, there must be a call.
    """

    tools: Sequence[Tool]
    many: bool
    answer: Json | None
    rule: str = ""
    field: str = "response_format"  # the request's field that ``answer`` or ``rule`` comes from

    @property
    def param(self) -> str:
        """The request's field that asks for this grammar."""
        return self.field if self.answer is not None or self.rule else "tools"


class OneSchema(msgspec.Struct, frozen=True):
    """One schema of a grammar, kept to find the one that cannot be compiled."""

    param: str
    schema: Json
    options: Json


class GrammarSource(msgspec.Struct, frozen=True):
    """A grammar's text, and the schemas that it contains."""

    text: str
    param: str
    schemas: list[OneSchema]


def answer_schema(wanted: ResponseFormat | None) -> Json | None:
    """Return the JSON schema that a ``response_format`` asks for; None for plain text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        return {"type": "object"}
    return wanted.json_schema.schema


def wish_for(form: ResponseFormat | None, outputs: Json | None) -> GrammarWish | None:
    """Return the wish for an answer without calls; None if the answer may be any text.

    Args:
        form: the request's ``response_format``.
        outputs: vLLM's own field, ``structured_outputs``.

    Raises:
        InvalidRequest: the request asks for two forms, or for one that only vLLM supports.
    """
    schema = answer_schema(form)
    asked = {name: value for name, value in (outputs or {}).items() if value not in (None, False)}
    if not asked:
        return None if schema is None else GrammarWish([], False, schema)
    name, value = next(iter(asked.items()))
    field = f"structured_outputs.{name}"
    if schema is not None or len(asked) > 1:
        raise InvalidRequest(f"{field}: an answer can have only one form", field)
    match name, read_schema(value) if name == "json" else value:
        case "json", dict() as schema:
            return GrammarWish([], False, schema, field=field)
        case "json_object", True:
            return GrammarWish([], False, {"type": "object"}, field=field)
        case "regex", str() as pattern if pattern:
            return GrammarWish([], False, None, pattern_rule(pattern), field)
        case "choice", [str(), *_] as texts if all(isinstance(x, str) and x for x in texts):
            return GrammarWish([], False, None, " | ".join(map(json.dumps, texts)), field)
    raise InvalidRequest(f"{field}: this engine does not support it: leave it out", field)


def pattern_rule(pattern: str) -> str:
    """Return a Lark rule for answers that match a regular expression as a whole."""
    grammar = json.loads(llguidance.grammar_from("regex", pattern))["grammars"][0]
    return str(grammar["lark_grammar"]).removeprefix("start: ")


def call_header(name: str) -> str:
    """Return the beginning of a call; the arguments, a JSON object, and ``}`` follow it."""
    return f'{{"name": {json.dumps(name)}, "arguments": '


def arguments_schema(tool: Tool) -> Json:
    """Return the JSON schema of a function's arguments: an empty object if it has no parameters.

    Clients also write ``properties: {}`` for a function without parameters.
    """
    given = tool.function.parameters or {"properties": {}}
    opens = (_OPENING | {"allOf"}) & given.keys() or given.get("required")
    if given.get("properties") == {} and not opens:
        given = {**given, "additionalProperties": False}
    return {"type": "object", **given}


def source_of(wish: GrammarWish) -> GrammarSource:
    """Return the grammar for a wish: calls, one per line, or the answer.

    Every schema is a grammar of its own, so a ``$ref`` keeps pointing into its own root.
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
    written = closed(enforceable(schema.schema))
    return "%json " + json.dumps({**written, "x-guidance": schema.options})


def closed(schema: Json) -> Json:
    """Return a schema that forbids additional properties wherever it does not mention them.

    Only objects that name properties are closed: a weak model adds properties without end where it
    may. A schema in which several schemas may apply to one object stays unchanged: a closed one
    would refuse the properties of another.
    """
    if _joins(schema):
        return schema
    shut: Json = _closed(schema)
    return shut


def _joins(node: Any) -> bool:
    """Return whether an object may have to obey several schemas that name properties."""
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
    """The outcome of a grammar's trial."""

    reason: str = ""  # why the grammar cannot be enforced; "" = it can be
    param: str = ""  # the request's field at fault
    nbytes: int = 0  # memory of the compiled grammar
    is_final: bool = True  # False: the machine was at fault, and another trial may succeed


def new_matcher(tokenizer: llguidance.LLTokenizer, text: str) -> LLMatcher:
    """Return a matcher for a grammar; its ``get_error()`` says what is wrong with the grammar."""
    source = LLMatcher.grammar_from_lark(text)
    return LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)


def tried(tokenizer: llguidance.LLTokenizer, source: GrammarSource, width: int) -> Verdict:
    """Compile a grammar, take the first steps of an answer, and return the verdict.

    Args:
        width: number of tokens in a mask of next tokens.
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
    """Generate the first tokens of some answer; return the grammar's fault, "" if there is none."""
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
        text = json.dumps(closed(enforceable(schema.schema)))
        source = LLMatcher.grammar_from_json_schema(text, overrides=schema.options)  # type: ignore[arg-type]
    except ValueError as error:
        return reason_of(str(error))
    found = LLMatcher.validate_grammar(source, tokenizer, limits=LIMITS)
    return reason_of(found) if found else ""


def reason_of(error: str) -> str:
    """Return a compiler's error in one line, without its internal state; a panic is reworded."""
    if "NoExtensionBias" in error or "stack level exceeded" in error:
        return "it describes no value: a $ref leads back to itself, or all choices are impossible"
    if "panic" in error or "backtrace" in error:
        return TOO_MUCH
    said = _PLACES.sub("", error.partition("<state>")[0])
    return " ".join(said.split())[:500] or TOO_MUCH
