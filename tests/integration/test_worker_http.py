"""The worker's HTTP face, spoken to by OpenAI's own client over a real port."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import uvicorn
from openai import AsyncOpenAI

from engines.config import EngineConfig, WorkerConfig
from engines.mlx_worker.generation import CacheOutcome, Generator
from engines.mlx_worker.http import create_app
from engines.mlx_worker.owner import Owner
from engines.wire import CACHE_HEADER, SALT_HEADER, SESSION_HEADER, TENANT_HEADER
from kvstore.config import StoreConfig
from tests.integration.tiny_models import tiny_model
from tests.tiny_tokenizer import PLAIN, THINKING, TOOLS, tiny_tokenizer
from tests.toy_owner import ToyOwner, saying

pytestmark = pytest.mark.mlx

LOGITS = 410
TOKEN = "secret"
HELLO: Any = [{"role": "user", "content": "Hello, how are you?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": CITY}}
CALL = '{"name": "look", "arguments": {"city": "Paris"}}'


class Stage:
    """A toy owner behind a served app, and clients for it."""

    def __init__(self, url: str, owner: Any, tokenizer: Any) -> None:
        self.url = url
        self.owner = owner
        self.tokenizer = tokenizer
        # Without TLS there is no need to load certificates, which takes most of a second.
        http = openai.DefaultAsyncHttpxClient(verify=False)
        self.client = AsyncOpenAI(
            base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, http_client=http
        )

    def script(self, text: str) -> None:
        end = self.tokenizer.eos_token_id
        self.owner.script = saying([*self.tokenizer.encode(text, add_special_tokens=False), end])

    async def chat(self, **fields: Any) -> Any:
        asked = {"model": "toy", "messages": HELLO, **fields}
        return await self.client.chat.completions.create(**asked)

    async def chunks(self, **fields: Any) -> list[Any]:
        return [chunk async for chunk in await self.chat(stream=True, **fields)]


@asynccontextmanager
async def staged(
    owner: Generator, tokenizer: Any, keepalive_s: float = 5.0
) -> AsyncIterator[Stage]:
    config = WorkerConfig(
        engine=EngineConfig(),
        store=StoreConfig(),
        model_path="toy",
        served_model_name="toy",
        runtime_dir="",
        token=TOKEN,
    )
    app = create_app(owner, tokenizer, config, keepalive_s)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([port]))
        while not server.started:
            await asyncio.sleep(0.01)
        stage = Stage(f"http://127.0.0.1:{port.getsockname()[1]}", owner, tokenizer)
        try:
            yield stage
        finally:
            await stage.client.close()
            server.should_exit = True
            await serving


Open = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture
def toy(tmp_path: Path) -> Open:
    def open_stage(template: str = PLAIN, keepalive_s: float = 5.0, **options: Any) -> Any:
        tokenizer = tiny_tokenizer(tmp_path, template, markers=template != PLAIN)
        return staged(ToyOwner(LOGITS, **options), tokenizer, keepalive_s)

    return open_stage


# ---- chat


async def test_chat_in_one_piece(toy: Open) -> None:
    outcome = CacheOutcome("cold-ram", 7, "diverged")
    async with toy(outcome=outcome) as stage:
        stage.script("Fine, naïve ☃.")
        raw = await stage.client.chat.completions.with_raw_response.create(
            model="toy", messages=HELLO
        )
        reply = raw.parse()
    assert raw.headers[CACHE_HEADER] == "cold-ram; tokens=7; reason=diverged"
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.content == "Fine, naïve ☃."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == len(stage.owner.submitted[0].prompt)
    assert reply.usage.prompt_tokens_details.cached_tokens == 7
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_chat_streamed(toy: Open) -> None:
    async with toy() as stage:
        stage.script("Fine, naïve ☃.")
        chunks = await stage.chunks(n=2, stream_options={"include_usage": True})
        plain = await stage.chunks()
    assert len({chunk.id for chunk in chunks}) == 1
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(x.delta.content or "" for x in mine) == "Fine, naïve ☃."
        assert [x.finish_reason for x in mine] == [None] * (len(mine) - 1) + ["stop"]
    *others, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in others)
    assert all("usage" in chunk.model_fields_set for chunk in others)
    assert not any("usage" in chunk.model_fields_set for chunk in plain)


async def test_length_and_stop(toy: Open) -> None:
    async with toy() as stage:
        stage.script("one two three four")
        short = await stage.chat(max_completion_tokens=3)
        stopped = await stage.chat(stop=[" thr", "nothing"], n=2)
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 3
    assert [x.message.content for x in stopped.choices] == ["one two"] * 2
    assert [x.finish_reason for x in stopped.choices] == ["stop"] * 2
    assert stage.owner.streams[-1].stopped_rows == [0, 1]


async def test_zero_tokens_reads_the_prompt_only(toy: Open) -> None:
    async with toy() as stage:
        stage.script("never shown")
        reply = await stage.chat(max_tokens=0)
    assert reply.choices[0].message.content == ""
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 0


async def test_logprobs(toy: Open) -> None:
    async with toy() as stage:
        stage.script("Hé ☃")
        reply = await stage.chat(logprobs=True, top_logprobs=3)
        chunks = await stage.chunks(logprobs=True)
    content = reply.choices[0].logprobs.content
    assert bytes(b for x in content for b in x.bytes).decode() == "Hé ☃"
    assert all(len(x.top_logprobs) == 3 for x in content)
    assert all(x.top_logprobs[0].token == x.token for x in content)
    assert all(x.logprob <= 0 for x in content)
    streamed = [x for c in chunks if (lp := c.choices[0].logprobs) for x in lp.content]
    assert [x.token for x in streamed] == [x.token for x in content]


async def test_a_seed_repeats_whatever_else_runs(toy: Open) -> None:
    """No script: the toy's noise is sampled, so two answers agree only by their seed."""
    async with toy() as stage:
        options = {"max_tokens": 12, "temperature": 2.0, "logprobs": True}

        async def ids(**fields: Any) -> list[list[str]]:
            reply = await stage.chat(**options, **fields)
            return [[x.token for x in choice.logprobs.content] for choice in reply.choices]

        alone = await ids(seed=7)
        beside = await asyncio.gather(ids(seed=7), ids(seed=8), ids(seed=7, n=2), ids())
    assert beside[0] == alone
    assert beside[1] != alone
    assert beside[2][0] == alone[0]
    assert beside[2][1] != alone[0]
    assert beside[3] != alone


async def test_logit_bias_and_penalties_reach_the_row(toy: Open) -> None:
    async with toy() as stage:
        stage.script("a")
        (banned,) = stage.tokenizer.encode("a")
        reply = await stage.chat(logit_bias={str(banned): -100}, max_tokens=1, temperature=0)
    assert reply.choices[0].message.content != "a"


async def test_reasoning(toy: Open) -> None:
    async with toy(THINKING) as stage:
        stage.script("two and two</think>\n\nfour")
        reply = await stage.chat()
        chunks = await stage.chunks()
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("two and two", "four")
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0
    deltas = [c.choices[0].delta for c in chunks]
    thoughts = [getattr(x, "reasoning_content", None) or "" for x in deltas]
    assert "".join(thoughts) == "two and two"
    assert "".join(x.content or "" for x in deltas) == "four"


# ---- tools and grammars


def calls_of(chunks: list[Any]) -> list[tuple[str, str]]:
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.function.name:
                assert call.id and call.type == "function"
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments or ""
    return [(name, arguments) for name, arguments in calls.values()]


async def test_calls_in_the_models_own_syntax(toy: Open) -> None:
    async with toy(TOOLS) as stage:
        stage.script(f"So.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>")
        reply = await stage.chat(tools=[LOOK])
        chunks = await stage.chunks(tools=[LOOK])
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So."
    assert [x.function.name for x in choice.message.tool_calls] == ["look", "look"]
    assert calls_of(chunks) == [("look", '{"city": "Paris"}')] * 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_calls_by_a_model_that_was_never_taught(toy: Open) -> None:
    async with toy(PLAIN) as stage:
        stage.script(CALL)
        reply = await stage.chat(tools=[LOOK])
        stage.script("No need.")
        other = await stage.chat(tools=[LOOK])
        prompt = stage.tokenizer.decode(stage.owner.submitted[0].prompt)
    assert reply.choices[0].message.content is None
    assert reply.choices[0].message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    assert other.choices[0].message.content == "No need."
    assert "You can call these functions:" in prompt


@pytest.mark.parametrize("template", [PLAIN, TOOLS])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
async def test_forced_calls_whatever_the_model_wants(toy: Open, template: str, choice: Any) -> None:
    """The toy wants to say something else; every token is held to the grammar."""
    other = {"type": "function", "function": {"name": "other"}}
    async with toy(template) as stage:
        stage.script("I would rather not.")
        fields = {"tools": [LOOK, other], "tool_choice": choice, "seed": 3, "max_tokens": 400}
        reply = await stage.chat(**fields)
        chunks = await stage.chunks(**fields)
    (call,) = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.content is None
    assert call.function.name in ("look", "other")
    json.loads(call.function.arguments)
    assert calls_of(chunks) == [(call.function.name, call.function.arguments)]


async def test_json_schema(toy: Open) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
    async with toy() as stage:
        stage.script("Never JSON.")
        reply = await stage.chat(response_format=wanted, seed=1, n=3, max_tokens=400)
        either = await stage.chat(response_format=wanted, tools=[LOOK], seed=1, max_tokens=400)
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert list(json.loads(choice.message.content)) == ["city"]
    message = either.choices[0].message
    assert message.tool_calls or list(json.loads(message.content)) == ["city"]


async def test_grammar_begins_behind_the_reasoning(toy: Open) -> None:
    async with toy(THINKING) as stage:
        stage.script("hm</think>{")
        reply = await stage.chat(response_format={"type": "json_object"}, seed=1, max_tokens=300)
    message = reply.choices[0].message
    assert message.reasoning_content == "hm"
    assert message.content.startswith("{")


# ---- text completions


async def test_text_completions(toy: Open) -> None:
    async with toy() as stage:
        stage.script(" Paris.")
        create = stage.client.completions.create
        one = await create(model="toy", prompt="The capital of France is", logprobs=2)
        many = await create(model="toy", prompt=["A", "B "], n=2, echo=True)
        ids = await create(model="toy", prompt=stage.tokenizer.encode("The"), max_tokens=2)
        stream = await create(
            model="toy",
            prompt=["A", "B"],
            stream=True,
            echo=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert one.choices[0].text == " Paris."
    scores = one.choices[0].logprobs
    assert "".join(scores.tokens) == " Paris."
    assert scores.text_offset[0] == 0
    assert all(x in y for x, y in zip(scores.tokens, scores.top_logprobs, strict=True))
    assert [x.text for x in many.choices] == ["A Paris."] * 2 + ["B  Paris."] * 2
    assert [x.index for x in many.choices] == [0, 1, 2, 3]
    assert ids.choices[0].finish_reason == "length"
    for index, text in enumerate(["A Paris.", "B Paris."]):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(x.text for x in mine) == text
        assert mine[-1].finish_reason == "stop"
    assert chunks[-1].usage.prompt_tokens == 2


# ---- errors


@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        ({"model": "nope"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, None),
        ({"logit_bias": {"410": 1}}, openai.BadRequestError, None),
        (
            {"messages": [{"role": "user", "content": "x" * 600}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}},
            openai.BadRequestError,
            None,
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(
    toy: Open,
    fields: dict[str, Any],
    error: type[openai.APIStatusError],
    code: str | None,
    stream: bool,
) -> None:
    async with toy() as stage:
        with pytest.raises(error) as refusal:
            await stage.chat(**fields, stream=stream)
    assert set(refusal.value.body) == {"message", "type", "param", "code"}
    assert refusal.value.code == code
    assert not stage.owner.submitted


async def test_full_line(toy: Open) -> None:
    async with toy(overloaded=True) as stage:
        with pytest.raises(openai.RateLimitError) as refusal:
            await stage.chat()
    assert refusal.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("depth", [450, 5000])
async def test_schema_nested_deeply(toy: Open, depth: int) -> None:
    schema = "{}"
    for _ in range(depth):
        schema = f'{{"anyOf":[{schema}]}}'
    wanted = f'{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}'
    messages = json.dumps(HELLO)
    body = f'{{"model":"toy","messages":{messages},"response_format":{wanted}}}'
    async with toy() as stage, aiohttp.ClientSession() as http:
        url, headers = f"{stage.url}/v1/chat/completions", {"authorization": f"Bearer {TOKEN}"}
        async with http.post(url, data=body, headers=headers) as refused:
            assert refused.status == 400
            assert (await refused.json())["error"]["type"] == "invalid_request_error"


async def test_failure_before_and_in_mid_stream(toy: Open) -> None:
    async with toy(fail_after=3) as stage:
        stage.script("one two three four five")
        with pytest.raises(openai.InternalServerError):
            await stage.chat()
        seen = []
        with pytest.raises(openai.APIError, match="no room"):
            async for chunk in await stage.chat(stream=True):
                seen.append(chunk)
        body = {"model": "toy", "messages": HELLO, "stream": True}
        async with _raw(stage, body) as response:
            raw = (await response.read()).decode()
    assert len(seen) > 1
    assert '"code":"generation_failed"' in raw
    assert "[DONE]" not in raw


async def test_engine_that_shuts_down_is_no_end_of_an_answer(toy: Open) -> None:
    async with toy(step_s=0.01, max_context=10_000) as stage:
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in await stage.chat(stream=True, extra_body={"ignore_eos": True}):
                stage.owner.streams[0].cancel()


async def test_only_who_knows_the_token(toy: Open) -> None:
    async with toy() as stage, aiohttp.ClientSession() as http:
        for headers in ({}, {"authorization": "Bearer secre"}, {"authorization": "Bearer sécret"}):
            async with http.get(f"{stage.url}/v1/models", headers=headers) as refused:
                assert refused.status == 401
                assert (await refused.json())["error"]["type"] == "authentication_error"
        async with http.get(f"{stage.url}/health") as healthy:
            assert healthy.status == 200


async def test_models_and_unknown_paths(toy: Open) -> None:
    async with toy() as stage:
        (listed,) = (await stage.client.models.list()).data
        assert listed == await stage.client.models.retrieve("toy")
        with pytest.raises(openai.NotFoundError):
            await stage.client.models.retrieve("a/b")
        with pytest.raises(openai.NotFoundError) as refusal:
            await stage.client.embeddings.create(model="toy", input="x")
    assert set(refusal.value.body) == {"message", "type", "param", "code"}


# ---- sessions, disconnects, keep-alives


def _raw(stage: Stage, body: dict[str, Any], **headers: str) -> Any:
    @asynccontextmanager
    async def post() -> AsyncIterator[aiohttp.ClientResponse]:
        bearer = {"authorization": f"Bearer {TOKEN}", **headers}
        url = f"{stage.url}/v1/chat/completions"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json=body, headers=bearer) as response,
        ):
            yield response

    return post()


async def test_session_headers(toy: Open) -> None:
    named = {TENANT_HEADER: "t", SESSION_HEADER: "caf%C3%A9%2F1", SALT_HEADER: "00ff"}
    body = {"model": "toy", "messages": HELLO, "max_tokens": 1}
    async with toy() as stage:
        async with _raw(stage, body, **named) as response:
            assert response.status == 200
        async with _raw(stage, body) as response:
            assert response.status == 200
        async with _raw(stage, body, **{**named, SALT_HEADER: "xx"}) as response:
            assert response.status == 400
    first, second = stage.owner.submitted
    assert (first.session.tenant, first.session.id) == ("t", "café/1")
    assert first.session.salt == b"\x00\xff"
    assert second.session is None


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_frees_its_slot(toy: Open, stream: bool) -> None:
    async with toy(step_s=0.01, max_context=100_000) as stage:
        body = {"model": "toy", "messages": HELLO, "stream": stream, "ignore_eos": True}

        async def ask() -> None:
            async with _raw(stage, body) as response:
                await response.read()

        asking = asyncio.create_task(ask())
        while not stage.owner.streams:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        asking.cancel()
        async with asyncio.timeout(1):
            await stage.owner.streams[0].cancelled.wait()


async def test_keepalives_while_the_prompt_is_read(toy: Open) -> None:
    async with toy(keepalive_s=0.05, prefill_s=0.3) as stage:
        stage.script("ok")
        body = {"model": "toy", "messages": HELLO, "stream": True}
        async with _raw(stage, body) as response:
            raw = (await response.read()).decode()
    comments = [line for line in raw.splitlines() if line.startswith(":")]
    assert ": keepalive" in comments
    assert any(line.startswith(": prefill") for line in comments)
    assert raw.endswith("data: [DONE]\n\n")


# ---- the real owner thread and a real (random) model


async def test_with_the_real_owner(tmp_path: Path) -> None:
    owner = Owner(lambda: tiny_model("llama"), EngineConfig(max_batch=4), "toy")
    await owner.start()
    try:
        async with staged(owner, tiny_tokenizer(tmp_path)) as stage:
            options = {"max_tokens": 8, "logprobs": True, "top_logprobs": 2}

            async def tokens(**fields: Any) -> list[str]:
                reply = await stage.chat(**options, **fields)
                return [x.token for x in reply.choices[0].logprobs.content]

            alone = await tokens(seed=5, presence_penalty=1)
            beside = await asyncio.gather(
                tokens(seed=5, presence_penalty=1),
                tokens(seed=6, top_p=0.9, extra_body={"top_k": 20}),
                tokens(temperature=0),
            )
            wanted = {"type": "json_schema", "json_schema": {"name": "p", "schema": CITY}}
            shaped = await stage.chat(response_format=wanted, max_tokens=400, seed=2, n=2)
    finally:
        await owner.close()
    assert beside[0] == alone
    for choice in shaped.choices:
        assert choice.finish_reason == "length" or list(json.loads(choice.message.content))
