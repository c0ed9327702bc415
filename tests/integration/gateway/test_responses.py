"""Responses as OpenAI's own client sees them; real processes, the fake engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from benchmarks.stacks.fake_stack import MODEL, FakeStack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    with FakeStack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: FakeStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as sdk:
        yield sdk


def test_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hello big world")
    assert response.output_text == "You said: hello big world"
    assert response.usage.input_tokens == 4


@pytest.mark.parametrize("fault", ["", "fault=bytes"])
def test_a_stream(client: openai.OpenAI, fault: str) -> None:
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


def test_an_answer_of_one_token_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hello", max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("fault", ["error-event", "cut", "no-done", "garbage"])
def test_a_stream_that_fails_says_so(client: openai.OpenAI, fault: str) -> None:
    stream = client.responses.create(
        model=MODEL, input="hello", stream=True, metadata={"fake": f"fault={fault} after=1"}
    )
    *_, last = stream
    assert last.type == "response.failed"
    assert last.response.error.message


def test_refusals_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-nope", input="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="word " * 40_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


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


def test_stored_chats(client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "hello"}]
    stream = client.chat.completions.create(
        model=MODEL, messages=asked, store=True, stream=True, metadata={"topic": "x"}
    )
    id = [x.id for x in stream][0]
    stored = client.chat.completions.retrieve(id)
    assert stored.choices[0].message.content == "You said: hello"
    assert [x.content for x in client.chat.completions.messages.list(id)] == ["hello"]
    assert client.chat.completions.update(id, metadata={"topic": "y"}).id == id
    assert [x.id for x in client.chat.completions.list(metadata={"topic": "y"})] == [id]
    assert client.chat.completions.delete(id).deleted


BODIES = (
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/conversations",
)


@pytest.mark.parametrize("path", BODIES)
def test_hostile_bodies_get_a_4xx_fast(stack: FakeStack, path: str) -> None:
    deep = b'{"input":' + b"[" * 200_000
    wide = json.dumps({"input": [{"role": "user", "content": "x"}] * 9000, "items": [{}] * 9000})
    before = stack.process.memory_info().rss
    for body in (b"", b"[]", b"\xff{", deep, b"x" * (9 << 20), wide.encode()):
        began = time.monotonic()
        with httpx2.Client() as http:
            reply = http.post(
                stack.url + path, content=body, headers={"content-type": "application/json"}
            )
        assert time.monotonic() - began < 20.0
        if body or path == "/v1/responses":  # of the others an empty body asks for nothing much
            assert 400 <= reply.status_code < 500, (body[:20], reply.text[:200])
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert stack.process.memory_info().rss - before < 64 << 20


def test_compaction_is_refused_in_words(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hello big world")
    with pytest.raises(openai.NotFoundError, match="ask for a summary") as caught:
        client.responses.compact(model=MODEL, previous_response_id=first.id)
    assert caught.value.code == "not_supported"
    item: Any = {"type": "compaction", "encrypted_content": "AAAA"}
    with pytest.raises(openai.BadRequestError, match="nothing is compacted here"):
        client.responses.create(model=MODEL, input=[item])
