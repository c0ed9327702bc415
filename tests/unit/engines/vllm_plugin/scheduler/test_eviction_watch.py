"""Evictions of a session's blocks from vLLM's pool are reported once, and harm no session."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from engines.vllm_plugin.scheduler.scheduler_side import EvictionWatch
from engines.wire import Notice, SessionRef, SessionReport, absent
from tests.block_sessions import hashes, ref, tokens_of
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import Pool

CHAIN = hashes(tokens_of(25))
NAME = ("t", "s")


def quiet_session(id: str = "s", chain: list[bytes] = CHAIN) -> tuple[ResidentSessions, Pool]:
    hot, pool = ResidentSessions(), Pool()
    hot.bind(pool)
    turn(hot, pool, id, chain)
    return hot, pool


def turn(hot: ResidentSessions, pool: Pool, id: str = "s", chain: list[bytes] = CHAIN) -> None:
    hot.begin(ref(id))
    pool.fill(chain)
    hot.end(ref(id), chain)


def test_a_session_is_hot_only_while_all_of_it_is_there():
    hot, pool = quiet_session()
    assert hot.num_resident(NAME) == len(CHAIN)
    del pool.cached[CHAIN[-1]]  # vLLM reuses a chain from its tail on
    assert hot.num_resident(NAME) == 0


def test_a_beginning_that_others_share_makes_no_session_hot():
    hot, pool = quiet_session("a")
    turn(hot, pool, "b", [*CHAIN[:5], *hashes(tokens_of(5, first=5000))])
    pool.cached = {h: x for h, x in pool.cached.items() if h not in CHAIN[5:]}
    assert hot.num_resident(("t", "a")) == 0
    assert hot.num_resident(("t", "b")) == 10


def test_a_cooled_session_is_reported_once():
    hot, pool = quiet_session()
    assert hot.pop_cooled() == []
    pool.cached.clear()
    assert hot.pop_cooled() == [NAME]
    assert hot.pop_cooled() == []
    turn(hot, pool)
    pool.cached.clear()
    assert hot.pop_cooled() == [NAME]


def test_a_session_that_is_served_is_not_cold():
    hot, pool = quiet_session()
    pool.cached.clear()
    hot.begin(ref())
    assert hot.pop_cooled() == []


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

    notice = await first_notice(*quiet_session(), look)
    assert (notice.cause, notice.session) == ("dropped", cold(ref()))


async def test_a_session_that_was_never_saved_is_lost():
    async def look(session: SessionRef) -> None:
        return None

    notice = await first_notice(*quiet_session(), look)
    assert notice.cause == "lost"
    assert (notice.session.id, notice.session.hot, notice.session.tier) == ("s", False, None)


@pytest.mark.parametrize("error", [TimeoutError, AssertionError])
async def test_a_session_that_cannot_be_looked_at_ends_no_watch(error: type[Exception]):
    hot, pool = quiet_session("a")
    turn(hot, pool, "b")

    async def look(session: SessionRef) -> SessionReport:
        if session.id == "a":
            raise error
        return cold(session)

    assert (await first_notice(hot, pool, look)).session.id == "b"
