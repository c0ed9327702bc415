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


def test_a_named_tool_is_called_with_arguments_that_fit_its_schema(client, model):
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Paris, in celsius?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=80,
    )
    choice = answer.choices[0]
    assert choice.finish_reason in ("tool_calls", "stop")
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")


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
