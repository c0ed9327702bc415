"""Compiles with llguidance grammars that vLLM would give to xgrammar; imports no vLLM, no torch."""

from __future__ import annotations

import json

import llguidance
from llguidance import LLMatcher

from engines.host.grammar import LIMITS, GrammarWish, new_matcher, source_of


def guided(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> LLMatcher | None:
    """Compile a JSON schema or a pattern; None if llguidance cannot.

    A schema becomes the same grammar as in our own engine.

    Args:
        kind: ``json`` or ``regex``.
    """
    try:
        if kind == "json":
            schema = json.loads(text)
            schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
            matcher = new_matcher(tokenizer, source_of(GrammarWish([], False, schema)).text)
        else:
            source = llguidance.grammar_from("regex", text)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    except (ValueError, RecursionError):
        return None
    return None if matcher.is_error() else matcher
