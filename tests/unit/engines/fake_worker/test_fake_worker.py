"""The fake engine's manners: its answers, its reuse and its faults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.fake_worker.fake_sessions import HOT_BYTES_PER_TOKEN, FakeSessions
from engines.fake_worker.server import EchoAnswer, Script, read_script
from engines.openai.requests import InvalidRequest, validate_chat
from engines.wire import Notice, SessionRef

ALICE = SessionRef(tenant="alice", id="s", salt=b"a")
BOB = SessionRef(tenant="bob", id="s", salt=b"b")


def fake_engine(capacity_bytes: int = 1 << 30) -> tuple[FakeSessions, list[Notice]]:
    heard: list[Notice] = []
    made = FakeSessions(capacity_bytes, clock=lambda: 0.0)
    made.listen(heard.append)
    return made, heard


def turn(engine: FakeSessions, ref: SessionRef, text: str, answer: str = "yes") -> str:
    prompt = text.split()
    cache = engine.begin(ref, prompt)
    engine.end(ref, prompt + answer.split())
    return cache.header()


def answer_to(text: str, script: str = "", **fields: Any) -> EchoAnswer:
    raw = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return EchoAnswer(validate_chat(raw), read_script({"metadata": {"fake": script}}), "m")


# ---- script


def test_scripts_are_read_from_metadata() -> None:
    raw = {"metadata": {"fake": "chunks=3 delay_s=0.5 fault=die after=2"}}
    assert read_script(raw) == Script(chunks=3, delay_s=0.5, fault="die", after=2)
    for nothing in ({}, {"metadata": None}, {"metadata": {"other": "x"}}):
        assert read_script(nothing) == Script()


@pytest.mark.parametrize("script", ["chunk=3", "chunks=many", "chunks=-1", "fault=explode", "die"])
def test_misspelt_scripts_are_refused(script: str) -> None:
    with pytest.raises(InvalidRequest):
        read_script({"metadata": {"fake": script}})


# ---- answers


def test_streamed_and_whole_answers_say_the_same() -> None:
    answer = answer_to("hello", "chunks=7", stream_options={"include_usage": True})
    events = [json.loads(x[6:]) for x in answer.events(4) if x.startswith(b"data: {")]
    text = "".join(c["delta"].get("content", "") for e in events for c in e["choices"])
    whole = answer.whole(4)
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_max_tokens_cuts_and_says_so() -> None:
    whole = answer_to("a b c d", max_tokens=3).whole(0)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 3


# ---- sessions


def test_a_returning_prompt_reuses_its_prefix() -> None:
    engine, _ = fake_engine()
    assert turn(engine, ALICE, "a b c") == "miss; tokens=0; reason=never-stored"
    assert turn(engine, ALICE, "a b c yes d") == "hot; tokens=4"
    assert turn(engine, ALICE, "a b X Y") == "hot; tokens=2; reason=diverged"
    assert turn(engine, ALICE, "Y") == "miss; tokens=0; reason=diverged"


async def test_a_busy_session_stays_hot() -> None:
    engine, _ = fake_engine()
    engine.begin(ALICE, ["a"])
    done = await engine.demote(ALICE, None)
    assert done.kept == "busy" and done.report is not None and done.report.busy


async def test_over_the_budget_the_longest_idle_is_dropped() -> None:
    engine, heard = fake_engine(capacity_bytes=5 * HOT_BYTES_PER_TOKEN)
    turn(engine, ALICE, "a b c")
    turn(engine, BOB, "a b c")
    assert [x.cause for x in heard] == ["turn", "saved", "turn", "saved", "dropped"]
    assert heard[-1].session.tenant == "alice"
    assert (await engine.stats()).hot_bytes == 4 * HOT_BYTES_PER_TOKEN


async def test_unknown_sessions() -> None:
    engine, _ = fake_engine()
    for answer in (engine.demote(ALICE, None), engine.prefetch(ALICE), engine.forget(ALICE)):
        assert (await answer).report is None
