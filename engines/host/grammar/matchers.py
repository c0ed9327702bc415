"""Compiles grammars with llguidance, tries out what came of them, and puts its errors in words.

Neither mlx nor anything of the engine is imported here: the process that tries grammars out is to
be small.
"""

from __future__ import annotations

import time
from typing import Final

import llguidance
import llguidance.numpy as bitmasks
import msgspec
import numpy as np
from llguidance import LLMatcher

from engines.host.grammar.source import GrammarSource, OneSchema

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
TOO_MUCH: Final = "it is too large or too complex"


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
        source = LLMatcher.grammar_from_json_schema(schema.schema, overrides=schema.options)  # type: ignore[arg-type]
    except ValueError as error:
        return reason_of(str(error))
    found = LLMatcher.validate_grammar(source, tokenizer, limits=LIMITS)
    return reason_of(found) if found else ""


def reason_of(error: str) -> str:
    """Return llguidance's error in a line, without its state; a panic is no sentence of it."""
    if "panic" in error or "backtrace" in error:
        return TOO_MUCH
    return " ".join(error.partition("<state>")[0].split())[:500] or TOO_MUCH
