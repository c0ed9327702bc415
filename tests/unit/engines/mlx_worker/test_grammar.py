from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest

from engines.host.grammar import (
    GrammarWish,
    Verdict,
    reason_of,
    source_of,
    tried,
)
from engines.host.grammar_trial import PROGRAM
from engines.mlx_worker import grammar as grammar_module
from engines.mlx_worker.grammar import Grammar, GrammarCompiler, GrammarFailed, GrammarProcessor
from engines.mlx_worker.model.loading import Vocabulary
from engines.openai.messages import Tool
from engines.openai.requests import ChatRequest, InvalidRequest, validate_chat

pytestmark = pytest.mark.mlx

PROMPT = [1, 2, 3]
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/Name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Name": {"type": "string", "maxLength": 8}},
}


def asked(**fields: Any) -> ChatRequest:
    return validate_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


def tools(*schemas: dict[str, Any] | None) -> list[Tool]:
    named = [{"name": f"f{i}", "parameters": x} for i, x in enumerate(schemas)]
    return asked(tools=[{"type": "function", "function": x} for x in named]).tools or []


def compiled(
    vocabulary: Vocabulary, tools: Sequence[Tool], many: bool, answer: dict[str, Any] | None
) -> Grammar:
    return Grammar.compile(vocabulary, source_of(GrammarWish(tools, many, answer)).text)


def verdict(
    vocabulary: Vocabulary, tools: Sequence[Tool], answer: dict[str, Any] | None
) -> Verdict:
    source = source_of(GrammarWish(tools, False, answer))
    assert vocabulary.grammar is not None
    return tried(vocabulary.grammar, source, vocabulary.width)


def allowed(processor: GrammarProcessor, generated: Sequence[int], width: int = 410) -> set[int]:
    logits = processor(mx.array([*PROMPT, *generated]), mx.zeros((1, width)))
    assert logits.shape == (1, width)
    return set(np.flatnonzero(np.array(logits)[0] == 0).tolist())


def accepts(vocabulary: Vocabulary, grammar: Grammar, text: str) -> bool:
    """True if each token of ``text`` may come, and then the end, and nothing else."""
    processor = grammar.processor(len(PROMPT), None)
    tokens = vocabulary.tokenizer.encode(text, add_special_tokens=False)
    for i, token in enumerate(tokens):
        if token not in allowed(processor, tokens[:i]):
            return False
    return bool(allowed(processor, tokens) & vocabulary.eos)


def test_schema_is_enforced(plain: Vocabulary) -> None:
    grammar = compiled(plain, [], False, CITY)
    assert accepts(plain, grammar, '{"city": "Rome"}')
    assert accepts(plain, grammar, '{\n  "city": "Rome"\n}')
    assert not accepts(plain, grammar, '{"city": 1}')
    assert not accepts(plain, grammar, '{"city": "Rome and Paris"}')
    assert not accepts(plain, grammar, "{}")
    assert not accepts(plain, grammar, '{"city": "Rome"')
    assert not accepts(plain, grammar, "{" + "\n" * 40 + '"city": "Rome"}')


def test_objects_are_closed_unless_they_say_otherwise(plain: Vocabulary) -> None:
    one = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    more = '{"a": 1, "b": 2}'
    for schema, extra in (
        (one, False),
        ({**one, "additionalProperties": True}, True),
        ({**one, "required": ["a", "b"]}, True),
        ({"allOf": [one]}, True),
        ({"type": "object"}, True),
        ({"anyOf": [one, {"type": "null"}]}, False),
        ({"$ref": "#/$defs/One", "$defs": {"One": one}}, False),
        ({**one, "anyOf": [{"properties": {"b": {}}}]}, True),
        ({"$ref": "#/$defs/One", "required": ["a"], "$defs": {"One": one}}, True),
    ):
        grammar = compiled(plain, [], False, schema)
        assert accepts(plain, grammar, '{"a": 1, "b": 2}' if extra else '{"a": 1}'), schema
        assert accepts(plain, grammar, more) is extra, schema
    both = {"$ref": "#/$defs/One", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    grammar = compiled(plain, [], False, {**both, "$defs": {"One": one}})
    assert accepts(plain, grammar, more)
    nested = {"type": "object", "properties": {"x": {"type": "array", "items": one}}}
    grammar = compiled(plain, tools(nested), False, None)
    assert accepts(plain, grammar, '{"name": "f0", "arguments": {"x": [{"a": 1}]}}')
    assert not accepts(plain, grammar, '{"name": "f0", "arguments": {"x": [{"a": 1, "b": 2}]}}')


def test_only_the_end_after_the_end(plain: Vocabulary) -> None:
    grammar = compiled(plain, [], False, {"type": "boolean"})
    processor, narrow = (grammar.processor(3, None) for _ in range(2))
    assert allowed(processor, []) == allowed(narrow, [], width=399)
    tokens = plain.tokenizer.encode("true", add_special_tokens=False)
    for i in range(len(tokens)):
        allowed(processor, tokens[:i])
    (end,) = plain.eos
    assert allowed(processor, tokens) == {end}
    # The batch may compute a step or two after the end.
    assert allowed(processor, [*tokens, end]) == {end}
    assert allowed(processor, [*tokens, end, 5]) == {end}


def test_calls_and_answers(plain: Vocabulary) -> None:
    grammar = compiled(plain, tools(CITY, None), False, {"type": "integer"})
    assert accepts(plain, grammar, '{"name": "f0", "arguments": {"city": "Rome"}}')
    assert accepts(plain, grammar, '{"name": "f1", "arguments": {}}')
    assert accepts(plain, grammar, "12")
    assert not accepts(plain, grammar, '{"name": "f2", "arguments": {}}')
    assert not accepts(plain, grammar, '{"name": "f1", "arguments": {"city": "Rome"}}')
    one = '{"name": "f1", "arguments": {}}'
    assert not accepts(plain, grammar, f"{one}\n{one}")


def test_a_function_without_parameters_is_called_without_arguments(plain: Vocabulary) -> None:
    """However its client writes that; a schema that opens itself stays open."""
    none: dict[str, Any] = {"type": "object", "properties": {}}
    for schema, extra in (
        (none, False),
        ({**none, "required": []}, False),
        ({"properties": {}}, False),
        ({**none, "additionalProperties": True}, True),
        ({**none, "allOf": [{"required": ["a"]}]}, True),
        ({"type": "object"}, True),
    ):
        grammar = compiled(plain, tools(schema), False, None)
        assert accepts(plain, grammar, '{"name": "f0", "arguments": {"a": 1}}') is extra, schema
        if "allOf" not in schema:
            assert accepts(plain, grammar, '{"name": "f0", "arguments": {}}'), schema


def test_several_calls_only_if_asked_for(plain: Vocabulary) -> None:
    one = '{"name": "f0", "arguments": {"city": "Rome"}}'
    grammar = compiled(plain, tools(CITY), True, None)
    assert accepts(plain, grammar, one)
    assert accepts(plain, grammar, "\n".join([one] * 8))
    assert not accepts(plain, grammar, "\n".join([one] * 9))


EMPTY = {"type": "integer", "minimum": 2, "maximum": 1}
WRONG = [
    {"type": "string", "enum": [1]},
    EMPTY,
]


@pytest.mark.parametrize("schema", WRONG)
def test_blames_the_schema(plain: Vocabulary, schema: dict[str, Any]) -> None:
    found = verdict(plain, [], schema)
    assert found.param == "response_format"
    assert len(found.reason) > len("the JSON schema cannot be enforced: ")
    assert verdict(plain, [], CITY) == Verdict()


def test_a_choice_without_an_end_gets_a_sentence(plain: Vocabulary) -> None:
    found = verdict(plain, [], {"anyOf": [{"$ref": "#"}]})
    assert "describes no value" in found.reason and "Bias" not in found.reason
    endless = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    function = {"name": "f", "parameters": endless}
    with pytest.raises(InvalidRequest, match="describes no value"):
        asked(tools=[{"type": "function", "function": function}], tool_choice="required")


def test_compilers_errors_have_no_lines_of_code() -> None:
    said = "[22:29:19] /project/cpp/regex_converter.cc:83: Regex parsing error: Unclosed '['"
    assert reason_of(said) == "Regex parsing error: Unclosed '['"
    said = "at 2(9): schema too large\n   1 | start: answer\n   2 | answer: %json {}\n    ^\n"
    assert reason_of(said) == "schema too large"


def test_blames_the_right_tool(plain: Vocabulary) -> None:
    found = verdict(plain, tools(CITY, {"properties": {"a": EMPTY}, "required": ["a"]}), CITY)
    assert found.param == "tools[1].function.parameters"


def test_a_token_that_cannot_be_is_a_failure(plain: Vocabulary) -> None:
    processor = compiled(plain, [], False, {"type": "boolean"}).processor(3, None)
    wrong = plain.tokenizer.encode("x", add_special_tokens=False)
    allowed(processor, [])
    with pytest.raises(GrammarFailed):
        allowed(processor, wrong)
    assert processor.failure


def test_a_panic_of_the_compiler_is_no_sentence_of_the_answer(plain: Vocabulary) -> None:
    """It has more symbols than llguidance can number, and is larger than a request may be."""
    many = {"properties": {f"p{i}": {"type": "string"} for i in range(200)}}
    listed = [tools(many)[0]] * 128
    with pytest.raises(GrammarFailed) as failure:
        compiled(plain, listed, False, None)
    assert "panic" not in str(failure.value) and "large" in str(failure.value)


def test_masks_that_take_too_long_end_their_answer_alone(plain, monkeypatch):
    monkeypatch.setattr(grammar_module, "FREE_MASK_S", -1.0)  # as if each took a second more
    processor = compiled(plain, [], False, CITY).processor(len(PROMPT), None)
    allowed(processor, [])
    with pytest.raises(GrammarFailed, match="too long"):
        for _ in range(3):
            allowed(processor, [])


ANY, OTHER = "any", "other"
SMALL = {"type": "object", "properties": {"a": {"type": "integer"}}}
# An automaton of a hundred million states: minutes and gigabytes, despite llguidance's limits.
ENDLESS = {"type": "integer", "multipleOf": 99_999_989}


@asynccontextmanager
async def compiling(vocabulary: Vocabulary) -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary)
    try:
        yield compiler
    finally:
        await compiler.close()


def wish(schema: dict[str, Any]) -> GrammarWish:
    return GrammarWish([], False, schema)


async def trial_of(compiler: GrammarCompiler) -> psutil.Process:
    """The process that tries grammars out, once there is one."""
    while not compiler.trials.num_begun or not (trials := _trials()):
        await asyncio.sleep(0.01)
    return trials[-1]


def _trials() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended: a zombie, or gone
            if PROGRAM in child.cmdline():
                found.append(child)
    return found


async def test_a_grammar_that_takes_too_much_is_refused_and_others_go_on(plain: Vocabulary) -> None:
    async with compiling(plain) as compiler:
        await compiler.of(ANY, wish(SMALL))
        with pytest.raises(InvalidRequest) as refusal:
            await compiler.of(ANY, wish(ENDLESS))
        assert refusal.value.param == "response_format" and "it takes too" in refusal.value.message
        assert await compiler.of(OTHER, wish(SMALL))
        assert compiler.trials.num_begun == 2
        with pytest.raises(InvalidRequest):  # without another trial
            await compiler.of(ANY, wish(ENDLESS))
        assert compiler.trials.num_begun == 2


async def test_a_client_that_leaves_ends_the_trial(plain: Vocabulary) -> None:
    async with compiling(plain) as compiler:
        await compiler.of(ANY, wish(SMALL))
        trial = await trial_of(compiler)
        work_s = sum(trial.cpu_times()[:2])
        trial.suspend()
        leaving = asyncio.create_task(compiler.of(ANY, wish(ENDLESS)))
        while sum(trial.cpu_times()[:2]) - work_s < 0.05:  # else it ends itself after 1 s
            trial.resume()
            await asyncio.sleep(0.01)
            trial.suspend()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert not trial.is_running()
        assert await compiler.of(OTHER, wish(SMALL))


async def test_a_process_that_was_killed_is_replaced(plain: Vocabulary) -> None:
    async with compiling(plain) as compiler:
        await compiler.of(ANY, wish(SMALL))
        trial = await trial_of(compiler)
        trial.kill()
        while trial.is_running():
            await asyncio.sleep(0.01)
        assert await compiler.of(ANY, wish(SMALL | {"required": ["a"]}))
        assert compiler.trials.num_begun == 2


async def test_a_grammar_is_compiled_once_for_a_tenant_and_few_are_known(plain: Vocabulary) -> None:
    async with compiling(plain) as compiler:
        kept = await compiler.of(OTHER, wish(SMALL))
        assert await compiler.of(ANY, wish(SMALL)) is not kept
        for i in range(80):
            await compiler.of(ANY, wish(SMALL | {"properties": {str(i): {}}}))
        assert await compiler.of(OTHER, wish(SMALL)) is kept
        assert len(compiler.known) == 64 and compiler.trials.num_begun == 1
