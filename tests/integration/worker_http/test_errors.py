"""Refusals and failures, in OpenAI's shape."""

from __future__ import annotations

import itertools
import json

import aiohttp
import openai
import pytest

from engines.http import PATIENCE_HEADER
from tests.integration.worker_http.stage import HELLO, TOKEN, Open, post

pytestmark = pytest.mark.mlx


CIRCLE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
OUTPUTS = [{"grammar": "a"}, {"regex": "(?=a)"}, {"regex": "a", "choice": ["a"]}]
REFUSED = [
    *({"temperature": 9}, {"logit_bias": {"410": 1}}, {"extra_body": {"min_tokens": 3}}),
    *({"extra_body": {"structured_outputs": x}} for x in OUTPUTS),
    *({"response_format": CIRCLE}, {"messages": [{"role": "user", "content": "x" * 600}]}),
]


async def test_refusals(toy: Open) -> None:
    async with toy() as stage:
        for fields, stream in itertools.product(REFUSED, (False, True)):
            with pytest.raises(openai.BadRequestError) as refusal:
                await stage.chat(**fields, stream=stream)
            assert set(refusal.value.body) == {"message", "type", "param", "code"}
            assert refusal.value.code == (
                "context_length_exceeded" if "messages" in fields else None
            )
    assert not stage.owner.submitted


async def test_full_line(toy: Open) -> None:
    async with toy(overloaded=True) as stage:
        with pytest.raises(openai.RateLimitError) as refusal:
            await stage.chat()
    assert refusal.value.response.headers["retry-after"] == "1"


async def test_its_own_line_is_left_when_the_patience_that_it_was_given_is_over(toy: Open) -> None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    async with toy(wait_s=0.5) as stage:
        for patience, status in [("0.100", 429), ("20.000", 200), ("soon", 400)]:
            async with post(stage, body, **{PATIENCE_HEADER: patience}) as answer:
                assert answer.status == status
        assert stage.owner.streams[0].cancelled.is_set()  # its place in the line is free


async def test_schema_nested_deeply(toy: Open) -> None:
    schema = "{}"
    for _ in range(5000):
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
        async with post(stage, body) as response:
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
            async with http.get(f"{stage.url}/", headers=headers) as refused:
                assert refused.status == 401
                assert (await refused.json())["error"]["type"] == "authentication_error"
