"""A replica puts its sessions away before it ends."""

from __future__ import annotations

import asyncio

import msgspec

from engines.base import Demoted, EngineUnavailable, SessionRef, TierName
from engines.on_ray.drain import AT_ONCE, save_all
from engines.wire import EngineReport
from tests.unit.engines.fleet.test_fleet_engine import Engine, report


class Busy(Engine):
    """An engine that packs for some looks, and moves the packed sessions."""

    def __init__(self, num_looks: int) -> None:
        super().__init__()
        self.num_looks = num_looks
        self.num_at_once = self.most_at_once = 0
        self.fails: set[str] = set()
        self.hangs = False

    async def stats(self) -> EngineReport:
        self.num_looks -= 1
        waits = 100 if self.num_looks >= 0 else 0
        return msgspec.structs.replace(await super().stats(), save_queue_bytes=waits)

    async def demote(self, session: SessionRef, tier: TierName | None = None) -> Demoted:
        assert self.num_looks < 0 and tier == "redis"
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await asyncio.sleep(3600 if self.hangs else 0)
        self.num_at_once -= 1
        if session.id in self.fails:
            raise EngineUnavailable("too large")
        held = msgspec.structs.replace(self.held[session.id], tier="redis", hot=False)
        self.held[session.id] = held
        return Demoted(held, "")


def busy(num_looks: int = 1) -> Busy:
    engine = Busy(num_looks)
    engine.held = {f"s{i}": report(i, hot=True) for i in range(30)}
    return engine


async def test_all_sessions_are_moved_once_nothing_waits_to_be_packed():
    engine = busy()
    assert await save_all(engine, 60) == 30
    assert {x.tier for x in engine.held.values()} == {"redis"}
    assert 1 < engine.most_at_once <= AT_ONCE


async def test_one_that_cannot_be_moved_keeps_none_of_the_others():
    engine = busy()
    engine.fails = {"s3", "s7"}
    assert await save_all(engine, 60) == 28


async def test_the_time_to_save_is_bounded():
    engine = busy()
    engine.hangs = True
    assert await save_all(engine, 0.2) == 0
    assert await save_all(busy(num_looks=10**9), 0.2) == 0
