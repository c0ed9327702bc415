"""``benchmarks.users`` against the real gateway, and against a server that knows none of ours."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import typer
from aiohttp import web
from typer.testing import CliRunner

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from benchmarks.users.__main__ import bench as bench_command
from benchmarks.users.capacity import Search
from benchmarks.users.workload import STRESS_REQUESTS
from gateway.keys import generate_key
from launch.errors import LaunchError, UsageError
from launch.remote import Address, Target, take_turn

KEY, LINE = generate_key("alice")
APP = typer.Typer()
APP.command()(bench_command)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    folder = tmp_path_factory.mktemp("bench")
    with FakeStack(folder, gateway={"api_keys": [LINE]}) as running:
        yield running


def bench(stack: FakeStack, *arguments: str) -> Any:
    return CliRunner().invoke(APP, [stack.url, "--api-key", KEY, *arguments])


def test_the_stress_table_is_whole_and_without_errors(stack, tmp_path):
    file, picture = tmp_path / "b.json", tmp_path / "b.png"
    ran = bench(stack, "--preset", "stress", "--json", str(file), "--plot", str(picture))
    assert ran.exit_code == 0, ran.output
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
    assert "errors: 0" in ran.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_agents_share_their_beginning_and_pause(stack):
    ran = bench(stack, "--preset", "agents", "--users", "1", "--turns", "4", "--think", "10ms")
    assert ran.exit_code == 0, ran.output
    assert "agents against" in ran.output


def test_capacity_is_judged_by_the_header(stack, tmp_path):
    file = tmp_path / "c.json"
    arguments = ("--find-capacity", "--words", "20", "--max-sessions", "6", "--json", str(file))
    ran = bench(stack, *arguments, "--plot", str(tmp_path / "c.svg"))
    assert ran.exit_code == 0, ran.output
    found = json.loads(file.read_text())
    assert (found["capacity"], found["at_least"], found["judged_by"]) == (6, True, "header")
    assert [x["opened"] for x in found["rounds"]] == [4, 6]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api-key", "wrong"], "wants another API key"),
        (["--model", "nope"], f"there are: {MODEL}"),
        (["--users", "0"], "one or more"),
        (["--users", "5000"], "at most 1000"),
        (["--think", "soon"], "--think: 'soon' is not a duration"),
        (["--preset", "nope"], "there is no preset 'nope'"),
        (["--plot", "x.gif"], "ends in .png"),
        (["--find-capacity", "--words", "1"], "--words"),
    ],
)
def test_mistakes_are_reported_before_anything_is_measured(stack, arguments, words):
    ran = bench(stack, *arguments)
    assert isinstance(ran.exception, LaunchError), ran.output
    assert words in str(ran.exception)


def test_no_server_there():
    ran = CliRunner().invoke(APP, ["http://127.0.0.1:1"])
    assert "does not answer" in str(ran.exception)
    assert isinstance(CliRunner().invoke(APP, ["ftp://x"]).exception, UsageError)


@pytest.mark.slow
def test_ctrl_c_prints_what_is_known(stack):
    words = [sys.executable, "-m", "benchmarks.users", stack.url, "--api-key", KEY]
    process = subprocess.Popen(
        [*words, "--think", "1h", "--users", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    asyncio.run(_until_idle(stack.url, 2))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted after 2 of 6" in out
    assert "Traceback" not in err


async def _until_idle(url: str, count: int) -> None:
    """Wait until so many new sessions of this run have had their first turn."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as http, asyncio.timeout(60):
        while True:
            async with http.get(f"{url}/v1/sessions") as answer:
                rows = (await answer.json())["data"]
            chats = [x for x in rows if "-chat-" in x["id"] and x["state"] == "idle"]
            if len(chats) >= count:
                await asyncio.sleep(0.5)  # the client reads the last bytes of its answers
                return
            await asyncio.sleep(0.1)


class Plain:
    """An OpenAI server that keeps so many conversations, and knows nothing of sessions."""

    def __init__(self, keeps: int, mute: bool = False, garbage: bytes = b"") -> None:
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._keeps = keeps
        self._mute = mute
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
        if self._mute:  # it only answers faster
            await asyncio.sleep(0.0 if cached else 0.8)
        usage: dict[str, Any] = {"prompt_tokens": size, "completion_tokens": 1}
        if cached and not self._mute:  # as vLLM: nothing is said where nothing was reused
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


async def test_a_server_that_says_nothing_is_judged_by_time():
    async with served(Plain(keeps=2, mute=True)) as (address, http):
        found = await Search(Target(address), words=20, most=3, start=3).run(http)
    assert found.judged_by == "time"
    assert not found.at_least


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
