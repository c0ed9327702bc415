"""The blocks that vLLM still holds of each session."""

from __future__ import annotations

import pytest

from engines.vllm_plugin.scheduler import resident_sessions as resident_module
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from tests.block_sessions import hashes, ref, tokens_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import Pool

CHAIN = hashes(tokens_of(10))
NAME = ("t", "s")
NAMED = tuple(enumerate("abcd"))


def bound(pool: Pool) -> ResidentSessions:
    hot = ResidentSessions()
    hot.bind(pool)
    return hot


def turn(hot: ResidentSessions, session: str, chain: list[bytes]) -> None:
    hot.begin(ref(session))
    hot.end(ref(session), chain)


def test_the_oldest_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_module, "MAX_SESSIONS", 8)
    hot = bound(Pool())
    for i in range(20):
        turn(hot, f"s{i}", CHAIN)
    assert [x for _, x in hot.names()] == [f"s{i}" for i in range(12, 20)]


def test_sessions_that_are_dropped_together_leave_what_the_others_have() -> None:
    pool = Pool()
    hot = bound(pool)
    chains = {x: hashes([*tokens_of(2 + i), *tokens_of(3, first=900 + i)]) for i, x in NAMED}
    for name, chain in chains.items():
        pool.fill(chain)
        turn(hot, name, chain)
    for name in ("b", "d"):
        hot.ask_to_drop(("t", name))
    hot.drop_asked()
    assert set(pool.cached) == {*chains["a"], *chains["c"]}


def test_a_session_that_is_busy_when_it_is_to_be_dropped_is_hot_after_its_turn() -> None:
    pool = Pool()
    hot = bound(pool)
    pool.fill(CHAIN)
    hot.begin(ref())
    hot.ask_to_drop(NAME)
    hot.drop_asked()
    hot.end(ref(), CHAIN)
    assert hot.num_resident(NAME) == len(CHAIN)
    hot.ask_to_drop(NAME)
    assert hot.num_resident(NAME) == 0
    hot.drop_asked()
    assert not pool.cached


class Disturbed(Pool):
    """vLLM's thread changes the entry while another looks."""

    disturb = 0

    def get_cached_block(self, block_hash, groups):
        if self.disturb:
            self.disturb -= 1
            raise RuntimeError("dictionary changed size during iteration")
        return super().get_cached_block(block_hash, groups)


def test_a_lookup_that_is_disturbed_is_made_again() -> None:
    pool = Disturbed()
    hot = bound(pool)
    pool.fill(CHAIN)
    turn(hot, "s", CHAIN)
    pool.disturb = 2
    assert hot.num_resident(NAME) == len(CHAIN)
    pool.disturb = 1000
    assert hot.num_resident(NAME) == 0
