"""``benchmarks.users`` against the real gateway, and against a server that knows none of ours."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks.stacks.fake_stack import FakeStack
from benchmarks.users.__main__ import main
from benchmarks.users.capacity import Search
from benchmarks.users.figures import Target
from benchmarks.users.workload import STRESS_REQUESTS
from gateway.keys import generate_key
from launch.remote.server import Address
from launch.remote.turn import take_turn

KEY, LINE = generate_key("alice")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    folder = tmp_path_factory.mktemp("bench")
    with FakeStack(folder, gateway={"api_keys": [LINE]}) as running:
        yield running


def bench(stack: FakeStack, *arguments: str) -> int:
    return main([stack.url, "--api-key", KEY, *arguments])


def test_the_stress_table_is_whole_and_without_errors(stack, tmp_path, capsys):
    file = tmp_path / "b.json"
    assert bench(stack, "--preset", "stress", "--json", str(file)) == 0
    report = json.loads(file.read_text())
    assert len(report["requests"]) == STRESS_REQUESTS
    assert len(report["phases"]) == 7
    assert report["errors"] == {}
    wrong = [x for x in report["requests"] if x["expected_error"]]
    assert [400 <= x["turn"]["status"] < 500 for x in wrong] == [True, True]
    sources = {x["source"]: x for x in report["sources"]}
    assert set(sources) == {"hot", "new"}  # returns of the multi-turn chats, and all others
    assert sources["hot"]["requests"] == 9
    assert sources["hot"]["reused_share"] > 0.5
    assert "errors: 0" in capsys.readouterr().out


def test_capacity_is_judged_by_the_header(stack, tmp_path):
    file = tmp_path / "c.json"
    arguments = ("--find-capacity", "--words", "20", "--max-sessions", "6", "--json", str(file))
    assert bench(stack, *arguments) == 0
    found = json.loads(file.read_text())
    assert (found["capacity"], found["at_least"], found["judged_by"]) == (6, True, "header")
    assert [x["opened"] for x in found["rounds"]] == [4, 6]


class Plain:
    """An OpenAI server that keeps so many conversations, and knows nothing of sessions."""

    def __init__(self, keeps: int, garbage: bytes = b"") -> None:
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._keeps = keeps
        self._garbage = garbage

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "plain"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if self._garbage:
            return web.Response(body=self._garbage, content_type="text/event-stream")
        messages = (await request.json())["messages"]
        first, size = messages[0]["content"], sum(len(x["content"].split()) for x in messages)
        cached = self._kept.pop(first, 0)
        self._kept[first] = size
        while len(self._kept) > self._keeps:
            self._kept.popitem(last=False)
        usage: dict[str, Any] = {"prompt_tokens": size, "completion_tokens": 1}
        if cached:  # as vLLM: nothing is said where nothing was reused
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        chunks: list[dict[str, Any]] = [
            {"choices": [{"delta": {"content": "ok"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        lines = [f"data: {json.dumps(x)}\n\n" for x in chunks]
        body = ("".join(lines) + "data: [DONE]\n\n").encode()
        return web.Response(body=body, content_type="text/event-stream")


@asynccontextmanager
async def served(plain: Plain) -> AsyncIterator[tuple[Address, aiohttp.ClientSession]]:
    server = web.Application()
    server.router.add_get("/v1/models", plain.models)
    server.router.add_post("/v1/chat/completions", plain.chat)
    runner = web.AppRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as http:
        yield Address(f"http://127.0.0.1:{port}"), http
    await runner.cleanup()


async def test_lost_returns_are_counted_on_any_server():
    async with served(Plain(keeps=10)) as (address, http):
        found = await Search(Target(address), words=20, most=64).run(http)
    assert found.judged_by == "usage"
    assert (found.capacity, found.at_least) == (10, False)
    assert [x.opened for x in found.rounds] == [4, 8, 16]
    assert [x.kept for x in found.rounds] == [4, 8, 10]


@pytest.mark.parametrize(
    ("garbage", "words"),
    [
        (b"data: {half\n\n", "no stream of events"),
        (b"data: [1]\n\n", "no stream of events"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (b'data: {"choices": []}\n\n', "cut off"),
        (b"", "failed"),
        (b"data: " + b"x" * (9 << 20), "an event of more than 8 MiB"),
    ],
)
async def test_a_broken_answer_is_reported_and_never_raised(garbage, words):
    plain = Plain(keeps=1, garbage=garbage or b" ")
    async with served(plain) as (address, http):
        if not garbage:
            address = Address("http://127.0.0.1:1")
        turn = await take_turn(http, address, "plain", [{"role": "user", "content": "Hi"}])
    assert not turn.ok
    assert words in turn.error
