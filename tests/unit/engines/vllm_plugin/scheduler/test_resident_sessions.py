"""The blocks that vLLM still holds of each session, and the news of those that it gave away."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from engines.vllm_plugin.scheduler import resident_sessions as resident_module
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from engines.vllm_plugin.scheduler.scheduler_side import EvictionWatch
from engines.wire import Notice, SessionRef, SessionReport, absent
from tests.block_sessions import hashes, ref, tokens_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import Pool

CHAIN = hashes(tokens_of(25))
NAME = ("t", "s")


def resident(id: str = "s", pool: Pool | None = None) -> tuple[ResidentSessions, Pool]:
    """After one turn of this session."""
    hot, pool = ResidentSessions(), pool or Pool()
    hot.bind(pool)
    turn(hot, pool, id)
    return hot, pool


def turn(hot: ResidentSessions, pool: Pool, id: str = "s", chain: list[bytes] = CHAIN) -> None:
    hot.begin(ref(id))
    pool.fill(chain)
    hot.end(ref(id), chain)


def test_a_session_is_hot_only_while_all_of_it_is_there() -> None:
    hot, pool = resident()
    assert hot.num_resident(NAME) == len(CHAIN)
    del pool.cached[CHAIN[-1]]  # vLLM reuses a chain from its tail on
    assert hot.num_resident(NAME) == 0


def test_a_beginning_that_others_share_makes_no_session_hot() -> None:
    hot, pool = resident("a")
    turn(hot, pool, "b", [*CHAIN[:5], *hashes(tokens_of(5, first=5000))])
    pool.cached = {h: x for h, x in pool.cached.items() if h not in CHAIN[5:]}
    assert hot.num_resident(("t", "a")) == 0
    assert hot.num_resident(("t", "b")) == 10


def test_a_cooled_session_is_reported_once() -> None:
    hot, pool = resident()
    assert hot.pop_cooled() == []
    for _ in range(2):
        pool.cached.clear()
        assert hot.pop_cooled() == [NAME]
        assert hot.pop_cooled() == []
        turn(hot, pool)


def test_a_session_that_is_served_is_not_cold() -> None:
    hot, pool = resident()
    pool.cached.clear()
    hot.begin(ref())
    assert hot.pop_cooled() == []


def test_the_oldest_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_module, "MAX_SESSIONS", 8)
    hot, pool = resident()
    for i in range(20):
        turn(hot, pool, f"s{i}")
    assert [x for _, x in hot.names()] == [f"s{i}" for i in range(12, 20)]


def test_sessions_that_are_dropped_together_leave_what_the_others_have() -> None:
    hot, pool = ResidentSessions(), Pool()
    hot.bind(pool)
    chains = {}
    for i, name in enumerate("abcd"):
        chains[name] = hashes([*tokens_of(2 + i), *tokens_of(3, first=900 + i)])
        turn(hot, pool, name, chains[name])
    for name in ("b", "d"):
        hot.ask_to_drop(("t", name))
    hot.drop_asked()
    assert set(pool.cached) == {*chains["a"], *chains["c"]}


def test_a_session_that_is_busy_when_it_is_to_be_dropped_is_hot_after_its_turn() -> None:
    hot, pool = resident()
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
    hot, _ = resident(pool=pool)
    pool.disturb = 2
    assert hot.num_resident(NAME) == len(CHAIN)
    pool.disturb = 1000
    assert hot.num_resident(NAME) == 0


def cold(session: SessionRef) -> SessionReport:
    return msgspec.structs.replace(absent(session), tier="ram", tokens=100, cold_bytes=10)


async def first_notice(hot: ResidentSessions, pool: Pool, look: Any) -> Notice:
    """What the gateway hears once all blocks are evicted and ``look`` says what is stored."""
    notices = asyncio.Queue[Notice]()
    watch = EvictionWatch(hot, look, notices.put_nowait, every_s=0.001)
    watching = asyncio.create_task(watch.run())
    pool.cached.clear()
    try:
        return await asyncio.wait_for(notices.get(), 30)
    finally:
        watching.cancel()


async def test_the_gateway_hears_of_it():
    async def look(session: SessionRef) -> SessionReport:
        return cold(session)

    notice = await first_notice(*resident(), look)
    assert (notice.cause, notice.session) == ("dropped", cold(ref()))


async def test_a_session_that_was_never_saved_is_lost():
    async def look(session: SessionRef) -> None:
        return None

    notice = await first_notice(*resident(), look)
    assert notice.cause == "lost"
    assert (notice.session.id, notice.session.hot, notice.session.tier) == ("s", False, None)


@pytest.mark.parametrize("error", [TimeoutError, AssertionError])
async def test_a_session_that_cannot_be_looked_at_ends_no_watch(error: type[Exception]):
    hot, pool = resident("a")
    turn(hot, pool, "b")

    async def look(session: SessionRef) -> SessionReport:
        if session.id == "a":
            raise error
        return cold(session)

    assert (await first_notice(hot, pool, look)).session.id == "b"
