"""The gateway as OpenAI's own client sees it; real processes, the fake engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.stacks.fake_stack import MODEL, FakeStack

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


# ---- responses


@pytest.mark.parametrize("fault", ["", "fault=bytes"])
def test_a_response_in_a_stream(client: openai.OpenAI, fault: str) -> None:
    events: list[Any] = []
    with client.responses.stream(
        model=MODEL, input="hello big world", metadata={"fake": fault}
    ) as stream:
        events += stream
        final = stream.get_final_response()
    assert final.output_text == "You said: hello big world"
    assert final.usage.output_tokens == 5
    deltas = [x.delta for x in events if x.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text and len(deltas) == 5
    assert events[-1].type == "response.completed"


def test_what_is_stored_outlives_a_kill(tmp_path: Path) -> None:
    with (
        FakeStack(tmp_path) as stack,
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as sdk,
    ):
        first = sdk.responses.create(model=MODEL, input="tell me something about the sea")
        chat = sdk.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], store=True
        )
        stack.process.kill()
    with (
        FakeStack(tmp_path) as stack,
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as sdk,
    ):
        assert sdk.responses.retrieve(first.id) == first
        assert [x.id for x in sdk.chat.completions.list()] == [chat.id]
        second = sdk.responses.create(model=MODEL, input="more", previous_response_id=first.id)
        assert second.usage is not None and first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens


def test_conversations(client: openai.OpenAI) -> None:
    items: list[Any] = [{"type": "message", "role": "user", "content": "one two"}]
    conversation = client.conversations.create(items=items, metadata={"a": "b"})
    response = client.responses.create(model=MODEL, input="three", conversation=conversation.id)
    assert response.conversation.id == conversation.id
    listed = list(client.conversations.items.list(conversation.id, limit=1, order="asc"))
    assert len(listed) == 3  # by pages of one
    cached = client.responses.create(model=MODEL, input="four", conversation=conversation.id)
    assert cached.usage.input_tokens_details.cached_tokens > 0
    assert client.conversations.update(conversation.id, metadata={}).metadata == {}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_compaction_is_refused_in_words(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hello big world")
    with pytest.raises(openai.NotFoundError, match="ask for a summary") as caught:
        client.responses.compact(model=MODEL, previous_response_id=first.id)
    assert caught.value.code == "not_supported"
    item: Any = {"type": "compaction", "encrypted_content": "AAAA"}
    with pytest.raises(openai.BadRequestError, match="not supported here; send a summary"):
        client.responses.create(model=MODEL, input=[item])
