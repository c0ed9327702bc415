"""Pins that are refused, and sessions that the store lost, as the engine's verbs see them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.errors import PinLimit
from kvstore.records import SessionRef
from tests.integration.mlx_harness import engine, session, text

pytestmark = pytest.mark.mlx


async def test_a_session_that_may_not_be_pinned_sleeps_as_before(tmp_path: Path) -> None:
    one, two = session("one"), session("two")
    async with engine("llama", tmp_path) as it:
        await it.turn(text(1, 200), one)
        await it.turn(text(2, 200), two)
        await it.settled()
        it.store._pins._max_bytes = 0
        with pytest.raises(PinLimit, match="pinned_share"):
            await it.verbs.pin(one, True)
        report = await it.verbs.report(one)
        assert report is not None and not report.pinned
        assert (await it.verbs.demote(one, None)).kept == ""
        it.owner.parts.keeper.hot.pin(("tenant", "two"), True)  # before its save was through
        await it.verbs.pin_saved(two)
        report = await it.verbs.report(two)
        assert report is not None and report.hot and not report.pinned


async def test_a_session_that_the_store_lost_is_told_of_and_loses_its_pin(tmp_path: Path) -> None:
    one, heard = session("one"), list[tuple[str, SessionRef]]()
    async with engine("llama", tmp_path) as it:
        it.owner.listen(lambda cause, ref: heard.append((cause, ref)))
        await it.turn(text(1, 200), one)
        await it.settled()
        await it.verbs.pin(one, True)
        hot = it.owner.parts.keeper.hot
        gone = SessionRef(one.tenant, one.id, b"")
        it.verbs.lost(gone)
        assert hot.is_pinned(("tenant", "one"))  # its hot copy is still there to be kept
        await it.verbs.pin(one, False)
        assert (await it.verbs.demote(one, None)).kept == ""
        hot.pin(("tenant", "one"), True)
        it.verbs.lost(gone)
        assert not hot.is_pinned(("tenant", "one"))
        await asyncio.sleep(0)  # what other threads post comes in order
        assert heard.count(("lost", gone)) == 2
