"""``python -m engines.vllm_plugin.grammar.program``: tries grammars that vLLM would compile.

It repeats the work that vLLM does for a grammar in its API server and, with our ``backend``, in its
EngineCore. ``host.grammar_trial`` has the main loop, which ends this process if a grammar takes too
much time or memory.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress

import llguidance
import msgspec
import xgrammar
from llguidance import LLMatcher

from engines.host.grammar import (
    LIMITS,
    MAX_MASK_S,
    TOO_MUCH,
    GrammarSource,
    GrammarWish,
    Verdict,
    first_steps,
    new_matcher,
    reason_of,
    source_of,
    tried,
)
from engines.host.grammar_trial import Judge, serve
from engines.vllm_plugin.grammar.wanted import WantedGrammar


def guided(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> LLMatcher | None:
    """Return llguidance's matcher for a JSON schema or a pattern; None if it cannot compile it.

    A schema becomes the same grammar as in our mlx engine.

    Args:
        kind: ``json`` or ``regex``.
    """
    try:
        if kind == "json":
            matcher = new_matcher(tokenizer, _source(text).text)
        else:
            source = llguidance.grammar_from("regex", text)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    except (ValueError, RecursionError):
        return None
    return None if matcher.is_error() else matcher


def _source(text: str) -> GrammarSource:
    schema = json.loads(text)
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return source_of(GrammarWish([], False, schema))


class Vocabularies(msgspec.Struct, frozen=True):
    """A model's vocabulary, in the forms that the two compilers read."""

    tokenizer: str  # the JSON of a fast tokenizer
    width: int
    eos: list[int]
    xgrammar: str  # the JSON of its ``TokenizerInfo``


class _Compilers:
    def __init__(self, given: Vocabularies) -> None:
        self._width = given.width
        self._tokenizer = llguidance.LLTokenizer(
            given.tokenizer, n_vocab=given.width, eos_token=given.eos
        )
        vocabulary = xgrammar.TokenizerInfo.deserialize_json(given.xgrammar)
        # One thread: the trial leaves cores to the model, and it is bounded by total work.
        self._xgrammar = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)

    def judge(self, frame: bytes) -> Verdict:
        wanted = msgspec.json.decode(frame, type=WantedGrammar)
        if wanted.kind == "json":
            with suppress(Exception):  # vLLM then tries another compiler
                xgrammar.Grammar.from_json_schema(wanted.text)
            with suppress(ValueError, RecursionError):  # xgrammar's error says what is wrong
                # Of a schema that contradicts itself xgrammar would ignore a part.
                verdict = tried(self._tokenizer, _source(wanted.text), self._width)
                return msgspec.structs.replace(verdict, param=wanted.param)
        reason = self._reason(wanted)
        return Verdict(reason and f"cannot be enforced: {reason}", wanted.param)

    def _reason(self, wanted: WantedGrammar) -> str:
        if wanted.kind == "regex":
            with suppress(Exception):
                xgrammar.Grammar.from_regex(wanted.text)
            if matcher := guided(self._tokenizer, wanted.kind, wanted.text):
                return first_steps(matcher, self._width)
        try:
            return self._first_mask(self._compiled(wanted))
        except Exception as error:  # xgrammar raises many kinds of errors
            return reason_of(str(error))

    def _compiled(self, wanted: WantedGrammar) -> xgrammar.CompiledGrammar:
        compiler, text = self._xgrammar, wanted.text
        if wanted.kind == "json":
            return compiler.compile_json_schema(text)
        if wanted.kind == "regex":
            return compiler.compile_regex(text)
        if wanted.kind == "grammar":
            try:
                return compiler.compile_grammar(text)
            except RuntimeError:
                return compiler.compile_lark(text)
        tag = json.loads(text)
        if "structures" not in tag:
            return compiler.compile_structural_tag(text)
        items = [
            xgrammar.StructuralTagItem(
                begin=x["begin"], schema=json.dumps(x["schema"]), end=x["end"]
            )
            for x in tag["structures"]
        ]
        return compiler.compile_structural_tag(items, tag["triggers"])

    def _first_mask(self, grammar: xgrammar.CompiledGrammar) -> str:
        matcher = xgrammar.GrammarMatcher(grammar)
        bits = xgrammar.allocate_token_bitmask(1, self._width)
        begin = time.thread_time()
        matcher.fill_next_token_bitmask(bits)
        return TOO_MUCH if time.thread_time() - begin > MAX_MASK_S else ""


def _begin(frame: bytes) -> Judge:
    return _Compilers(msgspec.msgpack.decode(frame, type=Vocabularies)).judge


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, _begin)
