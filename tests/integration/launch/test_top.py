"""``thermocline top`` against the real gateway: frames, and a server that goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from gateway.keys import generate_key
from launch.cli.main import app
from launch.errors import LaunchError
from tests.asking import asked
from tests.integration.launch.terminal import Terminal

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
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    key = KEYS[tenant][0]
    assert asked(f"{url}/v1/chat/completions", body, key=key, session=session).status == 200


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
    screen = live_view(stack, "alice", "--sort", "tokens")
    screen.until("all, by tokens")
    chat(stack.url, "alice", "another")
    screen.until("another")
    screen.interrupt()
    assert screen.end() == 0


def live_view(stack: FakeStack, tenant: str, *arguments: str) -> Terminal:
    command = [sys.executable, "-m", "launch", "top", "--url", stack.url]
    return Terminal(*command, "--api-key", KEYS[tenant][0], *arguments)


@pytest.mark.slow
def test_a_server_that_goes_is_waited_for(stack):
    """Last: no test after it has a server."""
    screen = live_view(stack, "bob")
    screen.until(f"{MODEL} on fake")
    stack.terminate()
    screen.until("trying again")
    screen.interrupt()
    assert screen.end() == 0
