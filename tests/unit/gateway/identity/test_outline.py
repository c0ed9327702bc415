"""Where a session's prompt leaves the one before, found by hashes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.identity.outline import Outline, PrefixWatch, PromptChange, change_between, hashed

SALT = b"s" * 32


def chat(*texts: str, system: str = "s", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text} for text in texts]
    return {"model": "m", "messages": [{"role": "system", "content": system}, *messages], **fields}


def outline_of(chat: dict[str, Any], salt: bytes) -> Outline:
    return hashed(chat["model"], chat["messages"], chat.get("tools"), salt).outline


@pytest.mark.parametrize(
    ("now", "change"),
    [
        (chat("a", "b", system="t"), PromptChange("system", 0)),
        (chat("a", "b", tools=[{}]), PromptChange("tools", 0)),
        (chat("x", system="t", model="n"), PromptChange("model", 0)),
    ],
)
def test_the_first_part_that_changed(now: dict[str, Any], change: PromptChange) -> None:
    assert change_between(outline_of(chat("a", "b"), SALT), outline_of(now, SALT)) == change


@given(st.lists(st.sampled_from("ab"), max_size=6), st.lists(st.sampled_from("ab"), max_size=6))
def test_messages_differ_where_their_texts_do(before: list[str], now: list[str]) -> None:
    found = change_between(outline_of(chat(*before), SALT), outline_of(chat(*now), SALT))
    if now[: len(before)] == before:
        assert found is None
    else:
        pairs = zip(before, now, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(now)))
        assert found == PromptChange("messages", same)


def test_tenants_have_different_hashes() -> None:
    assert outline_of(chat("a"), SALT) != outline_of(chat("a"), b"t" * 32)


def test_a_session_is_compared_with_its_own_latest_request() -> None:
    watch = PrefixWatch()
    for text in ("a", "b"):
        first = watch.compare("alice", text, outline_of(chat(text), SALT))
        assert first.change is None
    changed = watch.compare("alice", "a", outline_of(chat("x"), SALT))
    assert changed.change == PromptChange("messages", 0)
    assert watch.compare("bob", "a", outline_of(chat("y"), SALT)).change is None
    changed.prompt_tokens, changed.cached_tokens = 9, 4
    report = watch.report("alice", "a")
    assert (report.changed, report.at_message, report.num_messages) == ("messages", 0, 1)
    assert (report.prompt_tokens, report.cached_tokens) == (9, 4)
    watch.forget("alice", "a")
    assert watch.report("alice", "a") is None


def test_the_held_outlines_are_bounded() -> None:
    watch = PrefixWatch(capacity_bytes=20_000)
    outline = outline_of(chat(*"abcdefgh"), SALT)
    for i in range(1000):
        watch.name("alice", f"msg_{i}", watch.compare("alice", f"s{i}", outline))
    held = [i for i in range(1000) if watch.report("alice", f"s{i}")]
    assert 10 < len(held) < 50 and held[-1] == 999
    assert watch.answered_as("alice", "msg_0") is None
    assert watch.answered_as("alice", "msg_999") is not None
    assert watch.answered_as("bob", "msg_999") is None
    huge = outline_of(chat(*["x"] * 5000), SALT)
    watch.compare("alice", "huge", huge)
    assert watch.report("alice", "s999") is None
