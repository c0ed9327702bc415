"""A replica's HTTP server: the token, and an end that loses no answer."""

from __future__ import annotations

import asyncio

import aiohttp

from engines.on_ray.front import Front


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
