"""A replica's HTTP server: the token, and an end that loses no answer."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest

from engines.base import Demoted, EngineUnavailable, SessionRef, TierName
from engines.on_ray.front import AT_ONCE, Front, save_all
from engines.wire import EngineReport
from tests.unit.engines.pool.replicas import Engine, report


class Slow:
    """An application that answers when it may."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        self.asked.set()
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


async def test_without_the_token_nothing_is_answered_and_the_end_waits_for_answers():
    app = Slow()
    front = Front(app, "right", "127.0.0.1")
    await front.start()
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            async with session.get(f"{front.url}/health", headers=headers) as answer:
                assert answer.status == 401
        assert not app.asked.is_set()

        async def ask() -> bytes:
            headers = {"authorization": "Bearer right"}
            async with session.post(f"{front.url}/v1/chat/completions", headers=headers) as answer:
                return await answer.read()

        asking = asyncio.create_task(ask())
        await app.asked.wait()
        ending = asyncio.create_task(front.end(30))
        while True:
            try:
                async with session.get(front.url):
                    await asyncio.sleep(0.01)
            except aiohttp.ClientConnectorError:
                break
        assert not ending.done()
        app.may_answer.set()
        assert await asking == b"done" and await ending
    assert not front.serves


async def test_answers_that_take_too_long_are_cut():
    app = Slow()
    front = Front(app, "right", "127.0.0.1")
    await front.start()
    headers = {"authorization": "Bearer right"}
    async with aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.get(front.url, headers=headers))
        await app.asked.wait()
        assert not await front.end(1)
        try:
            async with await asking as answer:
                assert answer.status == 500
        except aiohttp.ClientError:
            pass


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
        return Demoted(held, None)


def busy(num_looks: int = 1) -> Busy:
    engine = Busy(num_looks)
    engine.held = {f"s{i}": report(i, hot=True) for i in range(30)}
    return engine


@pytest.mark.parametrize("fails", [set(), {"s3", "s7"}])
async def test_all_sessions_that_can_be_are_moved_once_nothing_waits_to_be_packed(fails):
    engine = busy()
    engine.fails = fails
    assert await save_all(engine, 60) == 30 - len(fails)
    assert {x.id for x in engine.held.values() if x.tier != "redis"} == fails
    assert 1 < engine.most_at_once <= AT_ONCE


async def test_the_time_to_save_is_bounded():
    engine = busy()
    engine.hangs = True
    assert await save_all(engine, 0.2) == 0
    assert await save_all(busy(num_looks=10**9), 0.2) == 0
