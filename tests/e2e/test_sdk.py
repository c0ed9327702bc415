"""OpenAI's official Python SDK against the whole product."""

from __future__ import annotations

import json

import openai
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


def test_logprobs_are_the_chosen_tokens_and_their_rivals(client, model):
    answer = client.chat.completions.create(
        model=model, messages=CAPITAL, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert "".join(x.token for x in content) == answer.choices[0].message.content
    for token in content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token


def test_n_gives_that_many_choices_and_a_seed_makes_them_repeatable(client, model):
    def sample(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=model, messages=CAPITAL, temperature=1.5, max_tokens=12, n=2, seed=seed
        )
        assert [x.index for x in answer.choices] == [0, 1]
        return [x.message.content for x in answer.choices]

    first = sample(7)
    assert first == sample(7)
    assert first[0] != first[1]
    assert first != sample(8)


def test_stop_strings_end_the_answer_and_are_not_in_it(client, model):
    answer = client.chat.completions.create(
        model=model, messages=CAPITAL, temperature=0, stop=["France"], max_tokens=20
    )
    assert "France" not in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_text_completions(client, model):
    answer = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert "Paris" in answer.choices[0].text


def test_models_can_be_listed_and_looked_up(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError),
        ({"messages": []}, openai.BadRequestError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"n": 10**9}, openai.BadRequestError),
        ({"max_tokens": -2}, openai.BadRequestError),
        ({"top_logprobs": 3}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, openai.BadRequestError),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_requests_are_refused_in_openais_shape(client, model, change, error):
    with pytest.raises(error) as refused:
        client.chat.completions.create(**{"model": model, "messages": CAPITAL, **change})
    assert set(refused.value.body) >= {"message", "type", "param", "code"}
    assert refused.value.body["message"]
