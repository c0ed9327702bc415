"""What lies after the last full block comes back too: exactly, or not at all.

A row that was computed alone, as those of an answer are, may differ in its last bit from one that
was computed with others, in any cache. So answers are compared with those of a request that
goes on without a break, or have one token, which has no row.
"""

from __future__ import annotations

import pytest

from tests.vllm.returns.test_restore import difference
from tests.vllm.rig.engine import BLOCK, RealEngine

pytestmark = pytest.mark.vllm
HISTORY = 600
FULL = HISTORY // BLOCK * BLOCK
ANSWER = 24


def turn_of(
    engine: RealEngine, prompt: list[int], session: str, tokens: int = 1, salt: str | None = None
) -> list[int]:
    """One turn, saved; afterwards the session is cold only. What was said in all."""
    answer = engine.ask(prompt, session, tokens=tokens, salt=salt).tokens
    engine.wait_saved(session)
    assert engine.forget_local()
    return prompt + answer


def fresh(engine: RealEngine, prompt: list[int]):
    assert engine.forget_local()
    return engine.ask(prompt, skip_reading_prefix_cache=True)


def test_an_answer_goes_on_as_if_it_had_not_been_broken_off(engine, sessions):
    """The last token of the first half is the only one to compute: it never was."""
    whole = engine.ask(sessions[0], tokens=2 * ANSWER)
    assert engine.forget_local()
    half = turn_of(engine, sessions[0], "broken", ANSWER)
    rest = engine.ask(half, "broken", tokens=ANSWER)
    assert rest.restored == rest.cached == len(half) - 1
    assert half[HISTORY:] + rest.tokens == whole.tokens
    pairs = zip(rest.logprobs, whole.logprobs[ANSWER:], strict=True)
    assert max(abs(a - b) for a, b in pairs) == 0.0


def test_the_next_turn_is_as_if_nothing_had_been_away(engine, sessions):
    """The reference computes the tokens after the last full block of vLLM's own hit again."""
    prompt = turn_of(engine, sessions[1], "next") + sessions[0][:50]
    back = engine.ask(prompt, "next")
    assert (back.cached, back.restored, back.reason) == (HISTORY, HISTORY, None)
    own = engine.ask(prompt)  # anonymous: vLLM's own blocks alone
    assert (own.cached, own.restored) == (len(prompt) // BLOCK * BLOCK, 0)
    right = fresh(engine, prompt)
    assert back.tokens == own.tokens == right.tokens
    assert difference(back, own) == difference(back, right) == 0.0


def test_turn_after_turn_through_the_cold(engine, sessions):
    """Parts become full blocks and chunks; in the end all is as computed in one go.

    But for the last bits: a few tokens at a time are added up in another order.
    """
    prompt = sessions[2][:70]
    for i in range(6):
        computed = len(prompt)
        prompt = turn_of(engine, prompt, "chat") + sessions[3][i * 20 : i * 20 + 27]
        back = engine.ask(prompt, "chat", tokens=1)
        assert back.restored == computed
        assert engine.forget_local()
    back = engine.ask(prompt, "chat")
    right = fresh(engine, prompt)
    assert right.tokens == back.tokens
    assert difference(right, back) < 1e-4


@pytest.mark.parametrize("kept", [1, 23])
def test_a_template_that_changed_the_end(engine, sessions, kept):
    """The rows before the change are as good as ever."""
    name = f"changed{kept}"
    prompt = turn_of(engine, sessions[3], name)[: FULL + kept] + [9, 9, 9] + sessions[0][:20]
    back = engine.ask(prompt, name)
    assert back.restored == FULL + kept
    right = fresh(engine, prompt)
    assert back.tokens == right.tokens
    assert difference(back, right) == 0.0


def test_one_that_cannot_be_restored_is_computed_again(engine, faults, sessions):
    prompt = turn_of(engine, sessions[4], "lost") + sessions[0][:20]
    right = fresh(engine, prompt)
    assert engine.forget_local()
    faults.lose_parts()
    failed = engine.counters().get("loads_failed", 0)
    back = engine.ask(prompt, "lost")
    assert (back.tokens, back.finish, back.reason) == (right.tokens, "length", "corrupt")
    assert difference(back, right) == 0.0
    assert engine.counters()["loads_failed"] == failed + 1


def test_another_tenant_gets_nothing_of_it(engine, sessions):
    prompt = turn_of(engine, sessions[5], "ours", salt="one") + sessions[0][:20]
    for salt in ("two", None):
        other = engine.ask(prompt, "ours", salt=salt, tokens=1)
        assert (other.cached, other.restored) == (0, 0)
        assert engine.forget_local()
    turn_of(engine, sessions[5], "ours", salt="one")
    assert engine.ask(prompt, "ours", salt="one", tokens=1).restored == HISTORY


def test_a_hot_session_gets_it_too(engine, sessions):
    answer = engine.ask(sessions[0][::-1], "hot", tokens=1).tokens
    prompt = sessions[0][::-1] + answer + sessions[1][:5]
    right = engine.ask(prompt)
    engine.wait_saved("hot")
    back = engine.ask(prompt, "hot")
    assert (right.cached, back.cached, back.restored) == (FULL, HISTORY, HISTORY - FULL)
    assert back.tokens == right.tokens
    assert difference(back, right) == 0.0
