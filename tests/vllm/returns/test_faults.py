"""A load that fails costs a recompute. Never a wrong token, a lost request or a block."""

from __future__ import annotations

import pytest

from tests.vllm.rig.engine import BLOCK, RealEngine

pytestmark = pytest.mark.vllm
WHOLE = 599 // BLOCK * BLOCK


def saved(engine: RealEngine, prompt: list[int], session: str) -> list[int]:
    """The right answer; afterwards the session is cold only."""
    answer = engine.ask(prompt, session).tokens
    engine.wait_saved(session)
    assert engine.forget_local()
    return answer


@pytest.mark.parametrize("first_token", [0, 256], ids=["first block", "middle block"])
def test_a_chunk_that_cannot_be_decoded_is_computed_again(engine, faults, sessions, first_token):
    name = f"failed{first_token}"
    right = saved(engine, sessions[0], name)
    faults.fail(first_token)
    before = engine.counters().get("loads_failed", 0)
    back = engine.ask(sessions[0], name)
    assert (back.tokens, back.finish, back.reason) == (right, "length", "corrupt")
    assert engine.counters()["loads_failed"] == before + 1
    faults.clear()
    engine.wait_saved(name)
    assert engine.forget_local()
    healed = engine.ask(sessions[0], name)
    assert (healed.tokens, healed.restored) == (right, WHOLE)


def test_a_first_block_that_always_fails_is_loaded_once(engine, faults, sessions):
    """The chunk stays in the store, so only the tracker's memory ends vLLM's retries."""
    right = saved(engine, sessions[5], "looping")
    faults.break_decoding(0)
    failed = engine.counters().get("loads_failed", 0)
    back = engine.ask(sessions[5], "looping")
    assert (back.tokens, back.finish) == (right, "length")
    assert engine.counters()["loads_failed"] == failed + 1


def test_an_abort_during_a_load_leaks_nothing_and_others_are_served(engine, faults, sessions):
    right = saved(engine, sessions[1], "aborted")
    faults.delay(2.0)
    gone = engine.ask(sessions[1], "aborted", abort_when=faults.is_decoding)
    assert gone.tokens == []
    assert not engine.engine.reset_prefix_cache(), "the client waited for the load to end"
    other = engine.ask(sessions[2], "meanwhile", tokens=4)
    assert len(other.tokens) == 4
    assert not engine.engine.reset_prefix_cache(), "the other waited for the load to end"
    faults.clear()
    assert engine.forget_local()
    back = engine.ask(sessions[1], "aborted")
    assert (back.tokens, back.restored) == (right, WHOLE)


def test_preemption_in_the_middle_of_an_answer(engine, sessions):
    """Three sessions that need more blocks than there are: vLLM takes some back and starts over."""
    prompts = [sessions[i][:320] for i in range(3)]
    alone = [engine.ask(x, tokens=120).tokens for x in prompts]
    together = engine.ask_all([(x, f"preempted{i}") for i, x in enumerate(prompts)], tokens=120)
    assert [x.tokens for x in together] == alone
