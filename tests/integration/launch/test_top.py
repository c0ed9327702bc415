"""``thermocline top`` against the real gateway: frames, keys, a server that goes and comes back."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import aiohttp
import pytest
from typer.testing import CliRunner

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from gateway.keys import generate_key
from launch.cli.main import app
from launch.errors import LaunchError
from launch.remote import Address
from launch.top import Watched

KEYS = {tenant: generate_key(tenant) for tenant in ("alice", "bob")}
LINES = [line for _, line in KEYS.values()]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    folder = tmp_path_factory.mktemp("top")
    with FakeStack(folder, gateway={"api_keys": LINES}) as running:
        chat(running.url, "alice", "hers")
        chat(running.url, "bob", "his")
        yield running


def chat(url: str, tenant: str, session: str) -> None:
    headers = {"authorization": f"Bearer {KEYS[tenant][0]}", "x-session-id": session}
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}).encode()
    headers["content-type"] = "application/json"
    asked = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    urllib.request.urlopen(asked, timeout=30).close()


def top(stack: FakeStack, *arguments: str, tenant: str = "alice"):
    key = KEYS[tenant][0]
    return CliRunner().invoke(app, ["top", "--url", stack.url, "--api-key", key, *arguments])


def test_one_frame_for_a_pipe(stack):
    shown = top(stack)
    assert shown.exit_code == 0, shown.output
    assert f"{MODEL} on fake" in shown.output
    assert "tenant alice" in shown.output
    assert "hers" in shown.output
    assert "his" not in shown.output.split()
    assert "0 of 1 session, pinned" in top(stack, "--only", "pinned").output


def test_the_snapshot_as_json(stack):
    shown = json.loads(top(stack, "--json", tenant="bob").output)
    assert [x["id"] for x in shown["sessions"]] == ["his"]
    assert shown["server"]["model"] == MODEL


def test_a_server_that_cannot_be_watched_is_reported(stack):
    wrong = CliRunner().invoke(app, ["top", "--url", stack.url, "--api-key", "wrong", "--once"])
    assert "another API key" in str(wrong.exception)
    absent = CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:1", "--once"])
    assert "does not answer" in str(absent.exception)
    assert isinstance(top(stack, "--sort", "luck").exception, LaunchError)


@pytest.mark.slow
def test_the_live_view_follows_its_keys(stack):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "launch", "top", "--url", stack.url]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    process = subprocess.Popen(
        [*command, "--api-key", KEYS["alice"][0]],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    until(ours, "by recent")
    os.write(ours, b"s")
    until(ours, "by tokens")
    os.write(ours, b"f")
    until(ours, "awake, by tokens")
    os.write(ours, b"q")
    drain(ours, process)
    assert process.wait(30) == 0
    os.close(ours)


def until(screen: int, words: str, timeout_s: float = 60.0) -> None:
    seen, end = "", time.monotonic() + timeout_s
    while words not in seen:
        assert time.monotonic() < end, seen
        if select.select([screen], [], [], 0.2)[0]:
            seen += os.read(screen, 65536).decode(errors="replace")


def drain(screen: int, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    """Read the output until the program has ended: a full terminal would hold it up."""
    end = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < end:
        if select.select([screen], [], [], 0.1)[0]:
            try:
                os.read(screen, 65536)
            except OSError:  # the other end is closed
                return


@pytest.mark.slow
async def test_changes_arrive_and_a_lost_server_is_reported(tmp_path):
    with FakeStack(tmp_path) as stack:
        watched = Watched(Address(stack.url))
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            async with http.post(
                f"{stack.url}/v1/chat/completions",
                json={"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]},
                headers={"x-session-id": "new"},
            ) as answer:
                assert answer.status == 200
            while [x["id"] for x in watched.said.get("sessions", ())] != ["new"]:
                await watched.try_to_ask(http)
            async with http.delete(f"{stack.url}/v1/sessions/new") as answer:
                assert answer.status == 200
            while watched.said["sessions"]:
                await watched.try_to_ask(http)
            assert not watched.trouble
            stack.terminate()
            while not watched.trouble:
                await watched.try_to_ask(http)
            assert "trying again" in watched.trouble
