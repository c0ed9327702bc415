"""Chats and responses on the real engine, through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from benchmarks.stacks.product_stack import Stack

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

STORY = "Tell me about the harbour of an old town, its ships and the people who work there."
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 24}


def test_the_sample_model_knows_the_capital_of_france(client: openai.OpenAI, model: str):
    asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(model=model, messages=asked, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def cached(response: Any) -> tuple[int, int]:
    return response.usage.input_tokens_details.cached_tokens, response.usage.input_tokens


def test_a_response_goes_on_in_its_session_and_reuses_its_prefix(client: openai.OpenAI, model: str):
    create = client.responses.with_raw_response.create
    first = create(model=model, input=STORY, **GREEDY)
    second = create(
        model=model, input="And at night?", previous_response_id=first.parse().id, **GREEDY
    )
    assert first.headers["x-thermocline-session"] == second.headers["x-thermocline-session"]
    reused, prompt = cached(second.parse())
    before = first.parse().usage
    # All of the first turn but the end of its answer, which the template may write otherwise.
    assert reused >= before.input_tokens + before.output_tokens - 4
    assert reused < prompt
    conversation = client.conversations.create()
    client.responses.create(model=model, input=STORY, conversation=conversation.id, **GREEDY)
    again = create(model=model, input="And at night?", conversation=conversation.id, **GREEDY)
    assert cached(again.parse())[0] >= reused
    assert again.headers["x-thermocline-session"] == conversation.id


def test_a_chat_and_a_response_say_the_same(client: openai.OpenAI, model: str):
    history: list[Any] = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Italy?"},
    ]
    chat = client.chat.completions.create(
        model=model, messages=history, temperature=0, max_tokens=24
    )
    response = client.responses.create(
        model=model, instructions=history[0]["content"], input=history[1:], **GREEDY
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_functions_are_called_and_answered(client: openai.OpenAI, model: str):
    tool: Any = {
        "type": "function",
        "name": "get_weather",
        "description": "Current weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    question: Any = {"role": "user", "content": "What is the weather in Paris?"}
    response = client.responses.create(
        model=model,
        input=[question],
        tools=[tool, {"type": "web_search"}],
        tool_choice={"type": "function", "name": "get_weather"},
        temperature=0,
        max_output_tokens=60,
    )
    (call,) = [x for x in response.output if x.type == "function_call"]
    assert set(json.loads(call.arguments)) == {"city"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = client.responses.create(
        model=model, input=[result], previous_response_id=response.id, tools=[tool], **GREEDY
    )
    assert answer.output  # a text, or another call: the model is small
    assert answer.usage.input_tokens_details.cached_tokens > 0


def test_the_same_on_vllm(vllm_stack: Stack):
    with openai.OpenAI(base_url=f"{vllm_stack.url}/v1", api_key="none", max_retries=0) as sdk:
        model = sdk.models.list().data[0].id
        first = sdk.responses.create(model=model, input=STORY, **GREEDY)
        second = sdk.responses.create(
            model=model, input="And at night?", previous_response_id=first.id, **GREEDY
        )
        with sdk.responses.stream(model=model, input=STORY, **GREEDY) as stream:
            events = list(stream)
        counted = sdk.responses.input_tokens.count(model=model, input=STORY)
    assert cached(second)[0] > 0
    assert events[-1].response.output_text == first.output_text  # type: ignore[union-attr]
    assert counted.input_tokens == first.usage.input_tokens
