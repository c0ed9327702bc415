"""Pins, and sessions that the store lost, as the engine's verbs see them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.ledger.notices import StoreNotice
from kvstore.session import SessionRef
from tests.integration.mlx_owner.harness import engine, hold_restores, session, text

pytestmark = pytest.mark.mlx


async def test_a_session_that_the_store_lost_is_reported_and_loses_its_pin(tmp_path: Path) -> None:
    one, heard = session("one"), list[tuple[str, SessionRef]]()
    async with engine("llama", tmp_path) as it:
        it.owner.on_change = lambda cause, ref, why: heard.append((cause, ref))
        await it.turn(text(1, 200), one)
        await it.settled()
        await it.verbs.pin(one, True)
        hot = it.owner.batching.hot_cache.sessions
        gone = SessionRef(one.tenant, one.id, b"")
        it.verbs.store_changed(StoreNotice(gone, "budget"))
        assert hot.is_pinned(("tenant", "one"))  # its hot copy is still there to be kept
        await it.verbs.pin(one, False)
        assert (await it.verbs.demote(one, None)).kept is None
        hot.pin(("tenant", "one"), True)
        it.verbs.store_changed(StoreNotice(gone, "budget"))
        assert not hot.is_pinned(("tenant", "one"))
        await asyncio.sleep(0)  # posts of other threads come in order
        assert heard.count(("lost", gone)) == 2


@pytest.mark.parametrize("wakes_by", ["turn", "prefetch"])
async def test_a_session_that_is_unpinned_while_it_comes_back_stays_unpinned(tmp_path, wakes_by):
    one = session("one")
    async with engine("llama", tmp_path) as it:
        first = await it.asleep_after(text(1, 200), one)
        it.store.pin(one, True)  # by an engine before this one
        reading, go_on = hold_restores(it)
        longer = [*text(1, 200), *first.tokens, 5]
        waking = it.turn(longer, one) if wakes_by == "turn" else it.verbs.prefetch(one)
        woken = asyncio.ensure_future(waking)
        assert await asyncio.to_thread(reading.wait, 30)
        await it.verbs.pin(one, False)
        go_on.set()
        await woken
        report = await it.verbs.report(one)
        assert report.hot and not report.pinned
