"""The gateway as OpenAI's own client sees it; real processes, the fake engine."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from benchmarks.stacks.fake_stack import MODEL

HELLO: list[Any] = [{"role": "user", "content": "hello big world"}]


def test_chat(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO)
    answer = raw.parse()
    assert answer.choices[0].message.content == "You said: hello big world"
    assert answer.usage.prompt_tokens == 4
    assert raw.headers["x-thermocline-session"].startswith("chat-")
    assert raw.request_id


def test_streams_carry_the_same_text_and_the_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "You said: hello big world"
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]


def test_text_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="once upon", max_tokens=3)
    assert answer.choices[0].text == "You said: once"
    assert answer.choices[0].finish_reason == "length"


def test_cached_tokens_are_true_over_three_turns(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "tell me about thermoclines please"}]
    cached, sessions = [], set()
    for _ in range(3):
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages)
        answer = raw.parse()
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        sessions.add(raw.headers["x-thermocline-session"])
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "go on"})
    # user: + 5 words; then assistant: + 7 words; then user: go on assistant: + 4 words
    assert cached == [0, 14, 22]
    assert len(sessions) == 1


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError):
        create(model="gpt-nope", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        create(model=MODEL, messages=HELLO, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        create(model=MODEL, messages=[{"role": "user", "content": "word " * 40_000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.InternalServerError):
        create(model=MODEL, messages=HELLO, metadata={"fake": "fault=plain-500"})


def test_an_error_event_in_a_stream_is_raised(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, metadata={"fake": "fault=error-event after=2"}
    )
    with pytest.raises(openai.APIError, match="out of memory"):
        list(stream)
