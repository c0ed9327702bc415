"""``thermocline top`` against the real gateway: frames, and a server that goes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from gateway.keys import generate_key
from launch.cli.main import app
from launch.errors import LaunchError

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
    assert "0 of 1 session(s), pinned" in top(stack, "--only", "pinned").output


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
def test_the_live_view_follows_the_server_until_it_is_interrupted(stack):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "launch", "top", "--url", stack.url]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "60"}
    process = subprocess.Popen(
        [*command, "--api-key", KEYS["alice"][0], "--sort", "tokens"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    until(ours, "all, by tokens")
    chat(stack.url, "alice", "another")
    until(ours, "another")
    process.send_signal(signal.SIGINT)
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
def test_a_server_that_goes_is_waited_for(stack):
    """Last: no test after it has a server."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", "top", "--url", stack.url, "--api-key", KEYS["bob"][0]],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "60"},
        start_new_session=True,
    )
    os.close(theirs)
    until(ours, f"{MODEL} on fake")
    stack.terminate()
    until(ours, "trying again")
    process.send_signal(signal.SIGINT)
    drain(ours, process)
    assert process.wait(30) == 0
    os.close(ours)
