"""Reading the list of replicas over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from engines.base import EngineError, EngineUnavailable
from engines.fleet.replica_list import MAX_LISTING_BYTES, ReplicaList

REPLICA = {"name": "a", "url": "http://10.0.0.7:9000", "control": "tcp://10.0.0.7:9001"}


@asynccontextmanager
async def served(status: int, body: bytes, path: str = "/replicas") -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        right = request.headers.get("authorization") == "Bearer token"
        return web.Response(status=status if right else 401, body=body)

    app = web.Application()
    app.router.add_post(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("path", ["/", "/replicas", "/a/b"])
async def test_a_list_is_read_with_its_token(path: str):
    async with served(200, json.dumps({"replicas": [REPLICA]}).encode(), path) as url:
        (replica,) = await ReplicaList(url, "token").read()
        assert (replica.name, replica.url, replica.leaving) == ("a", REPLICA["url"], False)
        with pytest.raises(EngineUnavailable, match="status 401"):
            await ReplicaList(url, "wrong").read()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (503, b"{}", "status 503"),
        (200, b"<html>", "no list of replicas at"),
        (200, b" " * (MAX_LISTING_BYTES + 1), "too long"),
    ],
)
async def test_an_answer_that_is_no_list_fails_with_the_reason(
    status: int, body: bytes, words: str
):
    async with served(status, body) as url:
        with pytest.raises(EngineUnavailable, match=words):
            await ReplicaList(url, "token").read()


async def test_nothing_listens_there_or_it_is_no_address():
    async with served(200, b"") as url:
        pass
    with pytest.raises(EngineUnavailable):
        await ReplicaList(url, "token").read()
    with pytest.raises(EngineError):
        ReplicaList("10.0.0.7:8000", "token")
