"""Restored KV is the KV that was computed: token for token, to the last bit of every logprob.

The reference is a hit in vLLM's own prefix cache; in float32 it equals a fresh prefill, too.
"""

from __future__ import annotations

import pytest

from engines.wire import Done, Forget
from tests.vllm.rig.engine import BLOCK, RealEngine, Result, ref

pytestmark = pytest.mark.vllm
WHOLE = 599 // BLOCK * BLOCK  # of 600 tokens; one at least is always computed


def difference(a: Result, b: Result) -> float:
    return max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))


def evict(engine: RealEngine, sessions: list[list[int]]) -> None:
    """Other sessions take the whole pool."""
    for i in range(3, 6):
        engine.ask(sessions[i], f"other{i}", tokens=2)


def test_after_real_eviction_nothing_has_changed(engine, sessions):
    fresh, own = [], []
    for i in range(3):
        fresh.append(engine.ask(sessions[i], f"exact{i}"))
        own.append(engine.ask(sessions[i], f"exact{i}"))
        engine.wait_saved(f"exact{i}")
    evict(engine, sessions)
    back = [engine.ask(sessions[i], f"exact{i}") for i in range(3)]
    assert [x.restored for x in back] == [WHOLE] * 3
    assert [x.tokens for x in back] == [x.tokens for x in own] == [x.tokens for x in fresh]
    assert max(difference(a, b) for a, b in zip(back, own, strict=True)) == 0.0


def test_turn_after_turn_through_the_cold(engine, sessions):
    """Each returns up to its last full chunk; in the end all is as computed in one go.

    But for the last bits: a few tokens at a time are added up in another order.
    """
    prompt = sessions[2][:70]
    for i in range(6):
        computed = len(prompt)
        prompt = prompt + engine.ask(prompt, "turns", tokens=1).tokens
        engine.wait_saved("turns")
        assert engine.forget_local()
        prompt += sessions[3][i * 20 : i * 20 + 27]
        assert engine.ask(prompt, tokens=1).restored == computed // BLOCK * BLOCK
        assert engine.forget_local()
    back = engine.ask(prompt, "turns")
    assert back.restored > 0
    assert engine.forget_local()
    right = engine.ask(prompt, skip_reading_prefix_cache=True)
    assert right.tokens == back.tokens
    assert difference(right, back) < 1e-4


def test_local_and_restored_blocks_make_one_prompt(engine, sessions):
    own = engine.ask(sessions[1], "mixed")
    engine.wait_saved("mixed")
    engine.forget_local()
    local = 10 * BLOCK
    engine.ask(sessions[1][:local] + sessions[5][:40], tokens=1)
    engine.forget_local()
    engine.ask([*sessions[1][:local], 5, 6, 7], tokens=1, skip_reading_prefix_cache=True)
    back = engine.ask(sessions[1], "mixed")
    assert (back.cached, back.restored) == (WHOLE, WHOLE - local)
    assert back.tokens == own.tokens


def test_a_history_that_was_edited_is_used_up_to_the_edit(engine, sessions):
    engine.ask(sessions[2], "edited")
    engine.wait_saved("edited")
    engine.forget_local()
    edited = sessions[2][:300] + sessions[3][:300]
    back = engine.ask(edited, "edited")
    assert back.restored == 300 // BLOCK * BLOCK
    assert back.reason == "diverged"
    engine.forget_local()
    assert engine.ask(edited, tokens=24, skip_reading_prefix_cache=True).tokens == back.tokens


def test_another_tenants_salt_gets_nothing(engine, sessions):
    prompt = sessions[0][::-1]
    engine.ask(prompt, "salted", salt="one")
    engine.wait_saved("salted")
    for salt in ("two", None):
        assert engine.forget_local()
        other = engine.ask(prompt, "salted", salt=salt, tokens=1)
        assert (other.cached, other.restored) == (0, 0)
    assert engine.forget_local()
    assert engine.ask(prompt, salt="one", tokens=1).restored > 0


def test_sessions_restored_at_the_same_time(engine, sessions):
    alone = [engine.ask(sessions[i], f"both{i}") for i in range(2)]
    for i in range(2):
        engine.wait_saved(f"both{i}")
    engine.forget_local()
    back = engine.ask_all([(sessions[i], f"both{i}") for i in range(2)])
    assert [x.restored for x in back] == [WHOLE] * 2
    assert [x.tokens for x in back] == [x.tokens for x in alone]


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "saved just now"])
def test_a_forgotten_session_is_gone_everywhere(engine, sessions, saved):
    prompt, name = sessions[4][::-1], f"forgotten {saved}"
    engine.ask(prompt, name, tokens=2)
    if saved:
        engine.wait_saved(name)
    done = engine.control(Forget(ref(name)))
    assert isinstance(done, Done) and (done.report is not None or not saved)
    assert engine.ask(prompt, "next", tokens=2).cached == 0
    engine.wait_saved("next")  # saved one after the other: all earlier saves have ended
    assert name not in engine.sessions()
    engine.control(Forget(ref("next")))
