"""The blocks that vLLM still holds of each session."""

from __future__ import annotations

import pytest

from engines.vllm_plugin.scheduler import resident_sessions as resident_module
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from tests.block_sessions import hashes, ref, tokens_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import Pool

CHAIN = hashes(tokens_of(10))
NAME = ("t", "s")


def bound(pool: Pool) -> ResidentSessions:
    hot = ResidentSessions()
    hot.bind(pool)
    return hot


def turn(hot: ResidentSessions, session: str, chain: list[bytes]) -> None:
    hot.begin(ref(session))
    hot.end(ref(session), chain)


def test_nothing_is_counted_of_blocks_that_no_session_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_module, "MAX_SESSIONS", 8)
    hot = bound(Pool())
    for i in range(100):
        for end in (5, 10):
            turn(hot, f"s{i % 20}", CHAIN[:2] + hashes(tokens_of(end, first=1000 * i)))
        if not i % 3:
            hot.ask_to_drop(("t", f"s{i % 20}"))
            hot.drop_asked()
    held = {x for _, session in hot.names() for x in hot.chain(ref(session))}
    assert len(hot.names()) == 8
    assert held == hot.block_hashes


def test_blocks_that_another_session_has_are_not_dropped() -> None:
    pool = Pool()
    hot = bound(pool)
    pool.fill(CHAIN)
    turn(hot, "s", CHAIN)
    turn(hot, "other", CHAIN[:4])
    hot.ask_to_drop(NAME)
    hot.drop_asked()
    assert set(pool.cached) == set(CHAIN[:4])


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
