"""Anthropic's client against real engines: the same conversation in each dialect."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import anthropic
import openai
import pytest

from benchmarks.stacks.product_stack import Stack

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.share("vllm_stack")]

SYSTEM = "You are a helpful assistant who answers in one short sentence."


@pytest.fixture(
    params=[pytest.param("sample_stack", marks=pytest.mark.share("sample_stack")), "vllm_stack"]
)
def running(request: pytest.FixtureRequest) -> Stack:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Stack)
    return found


@pytest.fixture
def sdk(running: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def model(sdk: anthropic.Anthropic) -> str:
    return sdk.models.list().data[0].id


def text_of(message: Any) -> str:
    return "".join(x.text for x in message.content if x.type == "text")


def total(usage: Any) -> int:
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    return sum(x or 0 for x in parts)


def test_a_conversation_of_an_agent(running, sdk, model) -> None:
    nonce = {"type": "text", "text": "x-anthropic-billing-header: cch=0;"}
    messages: list[Any] = [{"role": "user", "content": "Name a colour. " * 20}]
    usages: list[Any] = []
    for i, text in enumerate(("And another?", "One more?", "")):
        nonce["text"] = f"x-anthropic-billing-header: cc_version=2; cch={i}{i}a;"
        system: Any = [nonce, {"type": "text", "text": SYSTEM}]
        counted = sdk.messages.count_tokens(model=model, system=system, messages=messages)
        with sdk.messages.stream(
            model=model,
            max_tokens=12,
            system=system,
            messages=messages,
            extra_headers={"x-claude-code-session-id": f"e2e {running.port}"},
            extra_body={"temperature": 0.0},
        ) as stream:
            said = stream.get_final_message()
        assert said.stop_reason in ("end_turn", "max_tokens")
        assert total(said.usage) == counted.input_tokens
        usages.append(said.usage)
        messages += [
            {"role": "assistant", "content": [x.to_dict() for x in said.content]},
            {"role": "system", "content": f"{9 - i} tokens left"},
            {"role": "user", "content": text},
        ]
    for before, after in zip(usages, usages[1:], strict=False):
        assert after.cache_read_input_tokens >= total(before) - 32  # vLLM reuses whole blocks


def test_the_same_prompt_and_answer_as_in_the_chat_dialect(running, sdk, model):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        said = client.chat.completions.create(
            model=model,
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": "What is two and two?"},
            ],
            max_tokens=16,
            temperature=0,
        )
    message = sdk.messages.create(
        model=model,
        system=SYSTEM,
        messages=[{"role": "user", "content": "What is two and two?"}],
        max_tokens=16,
        extra_body={"temperature": 0},
    )
    assert total(message.usage) == said.usage.prompt_tokens
    assert text_of(message) == said.choices[0].message.content


def test_a_prefetch(running, sdk, model) -> None:
    messages: Any = [{"role": "user", "content": f"{running.port} " + "read this text. " * 40}]
    filled = sdk.messages.create(model=model, max_tokens=0, messages=messages)
    assert (filled.content, filled.stop_reason) == ([], "max_tokens")
    asked = sdk.messages.create(model=model, max_tokens=4, messages=messages)
    assert (asked.usage.cache_read_input_tokens or 0) >= total(asked.usage) - 32


def test_too_long_a_prompt(sdk, model) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        sdk.messages.create(
            model=model, max_tokens=4, messages=[{"role": "user", "content": "word " * 40_000}]
        )
    assert "prompt is too long" in str(caught.value)


def test_a_stop_string_that_is_whole_at_the_limit(running, sdk, model) -> None:
    """It is a stop in each dialect, streamed or not, whichever engine found it."""
    limit = 6
    hi: Any = [{"role": "user", "content": "Name three colours."}]
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        chat = partial(client.chat.completions.create, model=model, messages=hi, temperature=0)
        text = partial(client.completions.create, model=model, prompt="Red,", temperature=0)
        free = chat(max_tokens=limit).choices[0].message.content or ""
        stopped: Any = {"max_tokens": limit, "stop": _own_end(free)}
        ends = [chat(**stopped).choices[0], [*chat(stream=True, **stopped)][-1].choices[0]]
        response = client.responses.create(
            model=model,
            input=hi,
            temperature=0,
            max_output_tokens=limit,
            extra_body={"stop": stopped["stop"]},
        )
        free = text(max_tokens=limit).choices[0].text
        stopped = {"max_tokens": limit, "stop": _own_end(free)}
        ends += [text(**stopped).choices[0], [*text(stream=True, **stopped)][-1].choices[0]]
    assert [x.finish_reason for x in ends] == ["stop"] * 4
    assert response.status == "completed"
    asked: Any = {
        "model": model,
        "messages": hi,
        "max_tokens": limit,
        "stop_sequences": [ends[0].stop_reason],
        "extra_body": {"temperature": 0.0},
    }
    messages = [sdk.messages.create(**asked)]
    with sdk.messages.stream(**asked) as stream:
        messages.append(stream.get_final_message())
    for message in messages:
        assert (message.stop_reason, message.stop_sequence) == (
            "stop_sequence",
            ends[0].stop_reason,
        )


def _own_end(text: str) -> str:
    """The shortest end of a text that is nowhere else in it."""
    return next(text[-n:] for n in range(1, len(text) + 1) if text.find(text[-n:]) + n == len(text))
