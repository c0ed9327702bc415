"""Holds answers to a grammar: JSON, a JSON schema, or calls of given functions.

llguidance decides which tokens may come next; its verdict is applied as the last of an answer's
logits processors. The end-of-text tokens are allowed only where the grammar accepts, and nothing
else is allowed once it can take no more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.numpy as bitmasks
import mlx.core as mx
import numpy as np
from llguidance import LLMatcher
from mlx_lm.generate import StopSequences

from engines.mlx_worker.model.vocabulary import Vocabulary
from engines.openai.messages import Json, ResponseFormat, Tool
from engines.openai.requests import InvalidRequest

# A compiler that is given more is busy for seconds before it gives up.
_MAX_SOURCE_CHARS = 1 << 20
# Above this nobody looks for the one schema at fault: that means compiling them all again.
_MAX_BLAMED_CHARS = 1 << 17
# Between two lines of calls lies a line break; so there is none inside a call.
_MAX_CALLS = 8
_IN_CALLS = {"whitespace_pattern": " ?", "coerce_one_of": True}
# Bounded: a small model left free to indent may never stop doing so.
_IN_ANSWERS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}", "coerce_one_of": True}
# Where schemas stand inside a schema: values of other keys may look like one and be none.
_ONE_SCHEMA = frozenset({"items"})
_MANY_SCHEMAS = frozenset({"properties", "$defs", "definitions"})
_LISTED_SCHEMAS = frozenset({"anyOf", "oneOf", "prefixItems"})
# An object that has one of these says itself what else it may have.
_OPENING = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf"}
)


class GrammarFailed(Exception):
    """llguidance gave up in the middle of an answer: the grammar is too complex here."""


def answer_schema(wanted: ResponseFormat | None) -> Json | None:
    """The JSON schema that a response_format asks for; None for plain text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        return {"type": "object"}
    return wanted.json_schema.schema


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


def grammar_source(tools: Sequence[Tool], many: bool, answer: Json | None) -> str:
    """Write a grammar in llguidance's Lark: calls of ``tools``, one a line, or JSON of ``answer``.

    Every schema is a grammar of its own, so ``$ref`` keeps pointing into its own root.
    """
    starts = ["calls"] if tools else []
    rules = []
    if tools:
        more = f' ("\\n" call){{0,{_MAX_CALLS - 1}}}' if many else ""
        rules.append(f"calls: call{more}")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        rules.append(f'call_{i}: {json.dumps(call_header(tool.function.name))} args_{i} "}}"')
        rules.append(f"args_{i}: {_embedded(arguments_schema(tool), _IN_CALLS)}")
    if answer is not None:
        starts.append("answer")
        rules.append(f"answer: {_embedded(answer, _IN_ANSWERS)}")
    return "\n".join([f"start: {' | '.join(starts)}", *rules])


def _embedded(schema: Json, options: Json) -> str:
    return "%json " + json.dumps({**closed(schema), "x-guidance": options})


def closed(schema: Json) -> Json:
    """Close every object that names its properties and does not say whether it has more.

    A weak model adds properties without end where it may. Schemas that are put together by
    ``allOf`` stay as they are: a part that is closed would refuse the other's properties.
    """
    if _mentions(schema, "allOf"):
        return schema
    shut: Json = _closed(schema)
    return shut


def _mentions(node: Any, key: str) -> bool:
    if isinstance(node, dict):
        return key in node or any(_mentions(x, key) for x in node.values())
    return isinstance(node, list) and any(_mentions(x, key) for x in node)


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


class Grammar:
    """A compiled grammar, from which each answer takes a matcher of its own."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @classmethod
    def compile(
        cls, vocabulary: Vocabulary, tools: Sequence[Tool], many: bool, answer: Json | None
    ) -> Grammar:
        """Compile a grammar. Takes up to a second for large schemas: not for the event loop.

        Args:
            tools: the functions that may be called; empty for none.
            many: several calls may follow one another.
            answer: the JSON schema of an answer without calls; None = there must be a call.

        Raises:
            InvalidRequest: a schema is wrong, or beyond what can be enforced. Names the field.
        """
        if vocabulary.grammar is None:
            raise InvalidRequest(
                "This model's tokenizer cannot be held to a grammar: drop response_format and "
                "leave tool_choice at auto.",
                "response_format" if answer is not None else "tool_choice",
            )
        source = grammar_source(tools, many, answer)
        param = "response_format" if answer is not None else "tools"
        if len(source) > _MAX_SOURCE_CHARS:
            raise InvalidRequest(f"{param}: the JSON schemas are too large to enforce.", param)
        matcher = LLMatcher(vocabulary.grammar, LLMatcher.grammar_from_lark(source), log_level=0)
        if not matcher.is_error():
            return cls(matcher, vocabulary)
        if len(source) <= _MAX_BLAMED_CHARS:
            _blame(vocabulary.grammar, tools, answer)
        why = _first_line(matcher.get_error())
        raise InvalidRequest(f"{param}: cannot be enforced: {why}", param)

    def processor(self, prompt_tokens: int, after: tuple[int, ...] | None) -> GrammarProcessor:
        """Make the processor of one answer.

        ``after``: the grammar begins behind these tokens (the end of thinking).
        """
        matcher = self._matcher.deep_copy()
        return GrammarProcessor(matcher, self._vocabulary.width, prompt_tokens, after)


def _blame(tokenizer: llguidance.LLTokenizer, tools: Sequence[Tool], answer: Json | None) -> None:
    """Raise ``InvalidRequest`` for the first schema that does not compile by itself."""
    suspects = [
        (f"tools[{i}].function.parameters", arguments_schema(tool), _IN_CALLS)
        for i, tool in enumerate(tools)
    ]
    if answer is not None:
        suspects.append(("response_format", answer, _IN_ANSWERS))
    for param, schema, options in suspects:
        if found := _schema_error(schema, options, tokenizer):
            raise InvalidRequest(f"{param}: the JSON schema cannot be enforced: {found}", param)


def _schema_error(schema: Json, options: Any, tokenizer: llguidance.LLTokenizer) -> str:
    try:
        source = LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:
        return _first_line(str(error))
    return _first_line(LLMatcher.validate_grammar(source, tokenizer))


def _first_line(message: str) -> str:
    return " ".join(message.partition("<state>")[0].split())[:500]


class GrammarProcessor:
    """Logits processor of one answer; called on the owner thread only."""

    def __init__(
        self, matcher: LLMatcher, width: int, prompt_tokens: int, after: tuple[int, ...] | None
    ) -> None:
        self._matcher = matcher
        self._seen = prompt_tokens  # tokens so far that are settled
        # None once the grammar has begun.
        self._opening = StopSequences([after]).matcher() if after else None
        self._bits = bitmasks.allocate_token_bitmask(1, width)
        self.failure = ""  # why it gave up

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return (1, vocab) logits with -inf for every token that may not come next.

        ``tokens``: integers, (num_tokens,): the prompt and the answer so far.

        Raises:
            GrammarFailed: the matcher gave up; the answer must not go on unchecked.
        """
        fresh: list[int] = np.array(tokens[self._seen :]).tolist()
        self._seen += len(fresh)
        for token in fresh:
            self._take(token)
        if self._opening is not None:
            return logits
        bitmasks.fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        allowed = mx.array(bits[: logits.shape[-1]].astype(bool))
        return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))

    def _take(self, token: int) -> None:
        if self._opening is not None:
            if self._opening.advance(token):
                self._opening = None
        elif not self._matcher.is_stopped():
            # The step after the last token is already under way when the answer ends.
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            self.failure = _first_line(self._matcher.get_error()) or "unknown"
            raise GrammarFailed(self.failure)
