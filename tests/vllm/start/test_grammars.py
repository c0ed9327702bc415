"""Grammars on vLLM: tried in a process that can be ended, then compiled by the one that is good."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

import llguidance
import xgrammar
from transformers import AutoTokenizer
from vllm.config import StructuredOutputsConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tool_parsers import ToolParser, ToolParserManager
from vllm.v1.structured_output.backend_guidance import has_guidance_unsupported_json_features

from engines.openai.errors import InvalidRequest
from engines.openai.schemas.enforceable import enforceable
from engines.openai.schemas.held import with_enforceable_formats
from engines.openai.schemas.refs import Refs
from engines.vllm_plugin.grammar.program import guided
from engines.vllm_plugin.grammar.trial_gate import PROGRAM, ClientLeft, GrammarGate
from engines.vllm_plugin.grammar.wanted import for_calls
from engines.vllm_plugin.process.forced_calls import held_to_schema
from tests.unit.engines.openai.odd_schemas import OddSchemas, spellings
from tests.vllm.conftest import model_path
from tests.vllm.rig.served import Served, session

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

ONE, OTHER = "one", "other"
KINDS = ("email", "uri", "ipv6", "date-time")


def wide(number: int) -> dict[str, Any]:
    """A schema for whose formats xgrammar takes minutes."""
    properties = {f"f{i}": {"type": "string", "format": KINDS[i % 4]} for i in range(number)}
    return {"type": "object", "properties": properties, "required": list(properties)}


SMALL = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def forced(parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "write", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def answer_in(schema: dict[str, Any]) -> dict[str, Any]:
    wanted = {"name": "n", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


class Client:
    """The receiving side of a connection that sends a body in pieces, and may leave."""

    def __init__(self, fields: dict[str, Any]) -> None:
        body = json.dumps({"model": "m", **fields}).encode()
        self._pieces = [body[:50], body[50:]]
        self.body = body
        self.leaves = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self.leaves.wait()
        return {"type": "http.disconnect"}


@asynccontextmanager
async def gate() -> AsyncIterator[GrammarGate]:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    config = SimpleNamespace(get_vocab_size=lambda: len(tokenizer))
    gate = GrammarGate()
    gate.begin(SimpleNamespace(renderer=SimpleNamespace(tokenizer=tokenizer), model_config=config))
    try:
        yield gate
    finally:
        await gate.close()


def trials_of(process: psutil.Process) -> Sequence[psutil.Process]:
    return [x for x in process.children(recursive=True) if _is_trial(x)]


def _is_trial(process: psutil.Process) -> bool:
    try:
        return PROGRAM in process.cmdline()
    except psutil.Error:  # it has ended: a zombie, or gone
        return False


async def test_a_request_passes_whole_and_what_takes_too_much_does_not() -> None:
    async with gate() as the_gate:
        for fields in ({}, answer_in(SMALL), forced(SMALL)):
            client = Client(fields)
            receive = await the_gate.passed(ONE, client.receive)
            message = await receive()
            assert (message["body"], message["more_body"]) == (client.body, False)
            client.leaves.set()
            assert (await receive())["type"] == "http.disconnect"
        with pytest.raises(InvalidRequest, match="tools: cannot be enforced: it takes too"):
            await the_gate.passed(ONE, Client(forced(wide(2000))).receive)
        for field in ({"type": "string", "enum": [1]}, {"allOf": [LETTER, {"maxLength": 0}]}):
            client = Client(answer_in({"type": "object"} | needing("a", field)))
            with pytest.raises(InvalidRequest, match="'a' is unsatisfiable"):
                await the_gate.passed(ONE, client.receive)
        (before,) = trials_of(psutil.Process()) or [None]
        with pytest.raises(InvalidRequest):  # it is remembered
            await the_gate.passed(ONE, Client(forced(wide(2000))).receive)
        assert (trials_of(psutil.Process()) or [None]) == [before]
        assert await the_gate.passed(OTHER, Client(forced(SMALL)).receive)


async def test_a_client_that_leaves_ends_the_trial() -> None:
    async with gate() as the_gate:
        await the_gate.passed(ONE, Client(answer_in(SMALL)).receive)
        (trial,) = trials_of(psutil.Process())
        trial.suspend()  # so that it is under way for as long as it takes
        client = Client(answer_in(wide(3)))
        passing = asyncio.create_task(the_gate.passed(ONE, client.receive))
        await asyncio.sleep(0.1)
        client.leaves.set()
        with pytest.raises(ClientLeft):
            await passing
        assert not trial.is_running()
        assert await the_gate.passed(OTHER, Client(answer_in(wide(4))).receive)


def ask(served: Served, fields: dict[str, Any]) -> tuple[int, Any]:
    asked = {
        "model": "smol",
        "messages": [{"role": "user", "content": "Tell me of a person."}],
        "max_tokens": 200,
        "temperature": 0,
        **fields,
    }
    status, _, answer = served.run(served.post(asked, session("grammar")))
    return status, json.loads(answer)


def test_a_server_holds_answers_and_calls_to_schemas_at_once(vllm_server: Served) -> None:
    """vLLM by itself compiles all with the first one's backend, which ignores ``multipleOf``."""
    limits = {"type": "integer", "minimum": 10, "maximum": 99, "multipleOf": 7}
    first = {**SMALL, "properties": {**SMALL["properties"], "age": limits}}
    status, answer = ask(vllm_server, answer_in(first))
    assert status == 200, answer
    person = json.loads(answer["choices"][0]["message"]["content"])
    assert person["age"] % 7 == 0 and len(person["name"]) <= 40
    status, answer = ask(vllm_server, forced(SMALL))
    assert status == 200, answer
    (call, *_) = answer["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"name", "age"}
    status, answer = ask(vllm_server, {"structured_outputs": {"choice": ["red", "green"]}})
    assert answer["choices"][0]["message"]["content"] in ("red", "green")
    status, answer = ask(vllm_server, {"structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}})
    assert len(answer["choices"][0]["message"]["content"]) == 6
    status, answer = ask(
        vllm_server, {"response_format": {"type": "json_object"}, "max_tokens": 20}
    )
    assert answer["choices"][0]["message"]["content"].lstrip().startswith("{")


FOREIGN = {
    "type": "object",
    "properties": {
        "mail": {"type": "string", "format": "idn-email", "pattern": "^[a-z]{1,4}@b$"},
        "id": {"enum": [1, 2], "if": {"const": 1}, "then": True},
        "code": {"type": "string", "pattern": "^(?!x)", "enum": ["ab", "cd"]},
    },
    "required": ["mail", "id", "code"],
    "propertyNames": {"pattern": "^[a-z]+$"},
    "not": {"type": "null"},
}


def test_keywords_that_no_compiler_knows_are_left_out(vllm_server: Served) -> None:
    status, answer = ask(vllm_server, forced(FOREIGN))
    assert status == 200, answer
    (call, *_) = answer["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"mail", "id", "code"}
    sent = with_enforceable_formats(answer_in(FOREIGN))  # as the gateway does
    status, answer = ask(vllm_server, sent)
    assert status == 200, answer
    # The small model may write blanks until its limit, so the answer's end is not looked at.
    content = answer["choices"][0]["message"]["content"]
    assert re.match(r'\{\s*"mail"\s*:\s*"[a-z]{1,4}@b"', content), content


def test_an_answer_goes_on_from_the_assistants_own_words(vllm_server: Served) -> None:
    said = {"role": "assistant", "content": "Her name is"}
    messages = [{"role": "user", "content": "Tell me of a person."}, said]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    asked = {"messages": messages, "max_tokens": 4}
    _, other = ask(vllm_server, asked)
    status, answer = ask(vllm_server, {**asked, **going_on, "echo": True})
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"].startswith("Her name is")
    assert answer["usage"]["prompt_tokens"] < other["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("cut", "arguments"),
    [("}", '{"name": "Ann"}'), ('"}}', '{"name": "Ann'), (' {"name": "Ann"}}', "")],
)
def test_a_forced_call_that_is_cut_keeps_its_arguments_so_far(cut: str, arguments: str) -> None:
    hermes = held_to_schema(ToolParserManager.get_tool_parser("hermes"))
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    request = ChatCompletionRequest.model_validate({"messages": [], **forced(SMALL)})
    text = '<tool_call>\n{"name": "write", "arguments": {"name": "Ann"}}'.removesuffix(cut)
    found = hermes(tokenizer, request.tools).extract_tool_calls(text, request)
    (call,) = found.tool_calls
    assert (call.function.name, call.function.arguments) == ("write", arguments)
    assert not found.content
    beginning = hermes(tokenizer, request.tools).extract_tool_calls(text[:24], request)
    assert (beginning.tool_calls, beginning.content) == ([], text[:24])


def test_forced_calls_that_vllm_writes_as_one_schema() -> None:
    """So it does for the parsers of families that have no grammar of their own."""

    class Plain(ToolParser):
        pass

    messages = [{"role": "user", "content": "x"}]
    asked = ChatCompletionRequest.model_validate({"messages": messages, **forced(FOREIGN)})
    adjusted = held_to_schema(Plain)(None).adjust_request(asked)
    schema = adjusted.structured_outputs.json
    assert '"code"' in json.dumps(schema)
    for keyword in ('"if"', "propertyNames", "not", "(?!"):
        assert keyword not in json.dumps(schema)
    assert adjusted.tools[0].function.parameters == FOREIGN  # the prompt is the same


@pytest.mark.parametrize("where", ["$defs", "definitions"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "write"}}]
)
def test_refs_of_forced_calls_that_vllm_writes_as_one_schema(where: str, choice: Any) -> None:
    class Plain(ToolParser):
        pass

    digit = {"type": "string", "pattern": "^[0-9]$"}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": f"#/{where}/A"}, "b": {"$ref": "#"}},
        "required": ["a"],
        where: {"A": digit},
    }
    asked = {"messages": [{"role": "user", "content": "x"}], **forced(schema)}
    request = ChatCompletionRequest.model_validate({**asked, "tool_choice": choice})
    held = held_to_schema(Plain)(None).adjust_request(request).structured_outputs.json
    tokenizer = llguidance.LLTokenizer("byte")

    def takes(arguments: str) -> bool:
        matcher = guided(tokenizer, "json", json.dumps(held))
        assert matcher is not None
        call = f'[{{"name":"write","parameters":{arguments}}}]'
        text = call if choice == "required" else arguments
        return bool(matcher.consume_tokens(list(text.encode()))) and matcher.is_accepting()

    assert takes('{"a":"1","b":{"a":"2"}}')
    assert not takes('{"a":"x"}') and not takes('{"a":"1","b":{"a":"x"}}') and not takes("1")


def test_what_the_gateway_writes_passes_vllms_own_check() -> None:
    """It would send schemas with named patterns to outlines, which knows few keywords."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    for seed in range(40):
        made = enforceable(OddSchemas(Random(seed)).root())
        assert not has_guidance_unsupported_json_features(made)
    for other in (
        {"type": "integer", "multipleOf": 5},
        {"type": "string", "format": "ipv4", "maxLength": 9},
        {"allOf": [{"type": "string"}, {"maxLength": 3}, {"minLength": 1}]},
        {"type": "object", "patternProperties": {"^x": {"type": "string"}}},
    ):
        schema = enforceable({"type": "object", "properties": {"o": other}})
        asked = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
        model: Any = SimpleNamespace(is_diffusion=False)
        asked._validate_structured_outputs(model, StructuredOutputsConfig(), tokenizer)


LETTER = {"type": "string", "pattern": "^[a-z]$"}


def needing(name: str, field: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {name: field}, "required": [name]}


def opened(name: str) -> dict[str, Any]:
    return {"type": "object", **needing(name, LETTER), "additionalProperties": True}


EITHER = {"type": "object", "anyOf": [needing("b", LETTER), {}], **needing("c", LETTER)}
REF = needing("a", {"$ref": "#/$defs/A%3CB~1C%3E"})
ESCAPED = {"type": "object", **REF, "$defs": {"A<B/C>": LETTER}}
TITLES = [{"type": "object", **needing("title", x)} for x in (LETTER, {"type": "integer"})]
TITLED = {
    "type": "object",
    "properties": dict(zip("ab", TITLES, strict=True)),
    "required": ["a", "b"],
}
TITLE_OF_LETTERS = '{"a":{"title":"x"},"b":{"title":"y"}}'


COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([*(bytes([i]) for i in range(256)), b""], stop_token_ids=[256])
)


def takes_call(schema: dict[str, Any], text: str) -> bool:
    held = COMPILER.compile_json_schema(json.dumps(for_calls(schema)))
    matcher = xgrammar.GrammarMatcher(held)
    return all(matcher.accept_token(x) for x in [*text.encode(), 256])


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "string", "pattern": "^https?://[a-z]+$"}, ['"http://x"'], ['"x http://"']),
        ({"type": "string", "pattern": "@"}, ['"a\\"@b"', '"ab"'], []),
        ({"type": "string", "pattern": "^a(-[0-9]+)?$"}, ['"a"', '"a-1"'], ['"a1"']),
        ({"type": "string", "format": "date", "maxLength": 12}, ['"2020-01-02"'], ['"x"']),
        (EITHER, ['{"c":"x"}', '{"c":"x","d":1}'], ['{"c":"xy"}', "1"]),
        ({"type": "array", "minItems": 1}, ["[1]", '[1,"a"]'], ["[]"]),
        ({"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
        ({"type": "array", "items": [True, LETTER]}, ["[1]", '[1,"a",2]'], ['[1,"ab"]', "[1,2]"]),
        ({"type": "object", "required": ["b"]}, ['{"b":1}', "{}"], ["1"]),
        ({"properties": {"a": False, "c": LETTER}, "type": "object"}, ['{"c":"x"}'], ["1"]),
        ({"type": "integer", "minimum": 1, "exclusiveMaximum": 3}, ["1", "2"], ["0", "3"]),
        ({"type": "object", **needing("a", {"type": "object"})}, ['{"a":{"b":1}}'], ['{"a":1}']),
        (opened("é"), ['{"é":"x"}'], ['{"é":"xy"}', '{"é":1}']),
        (opened("\\"), ['{"\\\\":"x"}'], ['{"\\]":1}']),
        (opened("~/ a"), ['{"~/ a":"x","b":2}'], ['{"~/ a":1}']),
        (ESCAPED, ['{"a":"x"}'], ['{"a":"xy"}', '{"a":1}']),
        (TITLED, ['{"a":{"title":"x"},"b":{"title":1}}'], [TITLE_OF_LETTERS]),
    ],
)
def test_calls_are_held_to_what_a_schema_means(schema, taken, refused):
    assert [x for x in taken if not takes_call(schema, x)] == []
    assert [x for x in refused if takes_call(schema, x)] == []


@pytest.mark.parametrize("seed", range(150))
def test_a_call_may_have_all_that_an_odd_schema_allows(seed: int) -> None:
    maker = OddSchemas(Random(seed))
    schema = maker.root()
    if Refs(enforceable(schema)).endless:
        return
    COMPILER.compile_json_schema(json.dumps(for_calls(schema)))
    for value in maker.allowed(schema, 8):
        assert any(takes_call(schema, x) for x in spellings(value)), (schema, value)


def test_what_takes_too_much_is_refused_by_the_server(vllm_server: Served) -> None:
    status, answer = ask(vllm_server, forced(wide(2000)))
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "it takes too" in answer["error"]["message"]
