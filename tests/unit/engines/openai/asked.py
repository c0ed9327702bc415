"""Schemas that requests ask for, and what a grammar of them reads."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from engines.host.grammar import GrammarWish, source_of
from engines.openai.requests import ChatRequest, validate_chat
from engines.openai.schemas.enforceable import enforceable

TEXT = {"type": "string"}


CIRCLE = {"$ref": "#"}


def held(schema: dict[str, Any], strict: bool | None = None) -> ChatRequest:
    named = {"name": "n", "schema": schema, "strict": strict}
    return ask(response_format={"type": "json_schema", "json_schema": named})


def offered(schema: dict[str, Any], choice: Any = None, strict: bool | None = None) -> ChatRequest:
    function = {"name": "f", "parameters": schema, "strict": strict}
    return ask(tools=[{"type": "function", "function": function}], tool_choice=choice)


def ask(**fields: Any) -> ChatRequest:
    return validate_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


def of(**field: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": field}, "required": ["a"]}


BYTES = LLTokenizer("byte")


def reads(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar that is made of a schema takes this as a beginning."""
    matcher = LLMatcher(BYTES, source_of(GrammarWish([], False, enforceable(schema))).text)
    return bool(matcher.consume_tokens(list(text.encode())))
