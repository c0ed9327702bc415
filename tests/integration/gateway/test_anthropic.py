"""The gateway as Anthropic's own client sees it; real processes, the fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from tests.asking import asked
from tests.fields import fields

HELLO: list[Any] = [{"role": "user", "content": "hello big world"}]


@pytest.fixture(scope="module")
def client(stack: FakeStack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key="any", max_retries=0) as sdk:
        yield sdk


def text_of(message: anthropic.types.Message) -> str:
    return "".join(x.text for x in message.content if x.type == "text")


def test_a_message(client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(model=MODEL, max_tokens=50, messages=HELLO)
    message = raw.parse()
    assert text_of(message) == "You said: hello big world"
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", MODEL)
    assert message.id.startswith("msg_")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (4, 5)
    assert raw.request_id
    assert raw.headers["x-thermocline-session"].startswith("chat-")


def test_a_stream_carries_the_same(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == "You said: hello big world"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    usage = final.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == 4
    assert usage.output_tokens == 5


def test_a_conversation_reuses_what_is_there(client: anthropic.Anthropic) -> None:
    kept: Any = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [{"type": "text", "text": "you are kind", "cache_control": kept}]
    messages: list[Any] = [{"role": "user", "content": "one two three four"}]
    counts = []
    for _ in range(3):
        said = client.messages.create(model=MODEL, max_tokens=50, system=system, messages=messages)
        counts.append(said.usage)
        messages += [
            {"role": "assistant", "content": [x.to_dict() for x in said.content]},
            {"role": "user", "content": "more"},
        ]
    first, second, third = counts
    assert first.cache_read_input_tokens == 0
    assert first.cache_creation.ephemeral_1h_input_tokens == first.cache_creation_input_tokens
    assert first.cache_creation_input_tokens == 9
    for before, after in ((first, second), (second, third)):
        assert after.cache_read_input_tokens is not None
        total = (before.cache_read_input_tokens or 0) + (before.cache_creation_input_tokens or 0)
        assert after.cache_read_input_tokens > total


def test_the_model_is_listed(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active")
    assert client.models.retrieve(MODEL).created_at == model.created_at


@pytest.mark.parametrize("fault", ["error-event", "cut", "no-done", "garbage"])
def test_streams_that_fail_raise(client: anthropic.Anthropic, fault: str) -> None:
    wish: Any = {"fake": f"chunks=9 fault={fault} after=3"}
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(model=MODEL, max_tokens=50, messages=HELLO, metadata=wish) as stream,
    ):
        stream.get_final_message()


def show(stack: FakeStack, session: str) -> dict[str, Any]:
    return dict(asked(f"{stack.url}/v1/sessions/{session}").content)


def test_helpers_are_sessions_of_their_own(stack: FakeStack, client: anthropic.Anthropic) -> None:
    main = {"x-claude-code-session-id": "cc-1"}
    helper = {**main, "x-claude-code-agent-id": "7"}
    keep: Any = {"type": "ephemeral", "ttl": "1h"}
    texts = {"cc-1": "the long task", "cc-1/7": "look for files"}
    for _ in range(2):
        for session, headers in (("cc-1", main), ("cc-1/7", helper)):
            raw = client.messages.with_raw_response.create(
                model=MODEL,
                max_tokens=9,
                messages=[{"role": "user", "content": texts[session]}],
                cache_control=keep,
                extra_headers=headers,
            )
            assert raw.headers["x-thermocline-session"] == session
    assert raw.parse().usage.cache_read_input_tokens == 3
    found = show(stack, "cc-1/7")
    assert (found["kind"], found["parent"]) == ("child", "cc-1")
    assert 3000 < found["retain_s"] <= 3600
    assert found["prefix"]["changed"] is None
    assert show(stack, "cc-1")["kind"] == "main"


def test_diagnostics_name_what_changed(stack: FakeStack, client: anthropic.Anthropic) -> None:
    session = {"x-session-id": "watched"}

    def ask(previous: str | None, *texts: str, system: str = "be kind") -> Any:
        messages: Any = [{"role": "user", "content": text} for text in texts]
        with client.messages.stream(
            model=MODEL,
            max_tokens=9,
            system=system,
            messages=messages,
            diagnostics={"previous_message_id": previous},
            extra_headers=session,
        ) as stream:
            return stream.get_final_message()

    first = ask(None, "one two three four")
    assert first.diagnostics is None
    second = ask(first.id, "one two three four", "five")
    assert second.diagnostics is None
    third = ask(second.id, "one two", "five")
    reason = third.diagnostics.cache_miss_reason
    assert (reason.type, reason.cache_missed_input_tokens) == ("messages_changed", 4)
    assert show(stack, "watched")["prefix"] == fields(
        "changed=messages at_message=0 num_messages=2 prompt_tokens=8 cached_tokens=6"
    )
    fourth = ask(third.id, "one two", "five", system="be brief")
    assert fourth.diagnostics.cache_miss_reason.type == "system_changed"
    fifth = ask("msg_none", "one two", "five", system="be brief")
    assert fifth.diagnostics.cache_miss_reason.type == "previous_message_not_found"
    log = stack.log.read_text()
    assert "session watched: the messages changed (message 0 of 2): 6 of 8 tokens" in log
