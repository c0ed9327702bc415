"""OpenAI's official Python SDK against the whole product."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_sample_model_knows_the_capital_of_france(client, model):
    answer = client.chat.completions.create(model=model, messages=CAPITAL, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_streaming_gives_the_same_text_and_a_usage_chunk(client, model):
    whole = client.chat.completions.create(
        model=model, messages=CAPITAL, temperature=0, max_tokens=12
    )
    stream = client.chat.completions.create(
        model=model,
        messages=CAPITAL,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(x.choices[0].delta.content or "" for x in chunks if x.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [x.choices for x in chunks].count([]) == 1
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_json_schema_is_obeyed(client, model):
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "country": {"const": "FR"}},
        "required": ["capital", "country"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model,
        messages=CAPITAL,
        temperature=0,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "capital", "schema": schema, "strict": True},
        },
    )
    parsed = json.loads(answer.choices[0].message.content)
    assert parsed["country"] == "FR"
    assert isinstance(parsed["capital"], str)
