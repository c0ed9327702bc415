"""``thermocline connect`` asks a running server for the values that it shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from launch.cli.main import app
from launch.machine.folders import announced
from launch.remote.server import ask_server
from tests.asking import http_ok, saying

GONE = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    with FakeStack(tmp_path_factory.mktemp("stack")) as running:
        yield running


def test_connect_shows_and_writes(stack, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    run = CliRunner()
    shown = run.invoke(app, ["connect", "claude", "--url", stack.url])
    written = run.invoke(app, ["connect", "claude", "--url", f"{stack.url}/", "--write"])
    by_hand = run.invoke(app, ["connect", "cline", "--url", stack.url, "--write"])
    assert f"export ANTHROPIC_BASE_URL='{stack.url}'" in shown.output
    assert written.exit_code == 0, written.output
    env = json.loads((home / ".claude" / "settings.json").read_text())["env"]
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_MODEL"]) == (stack.url, MODEL)
    assert by_hand.exit_code != 0


def test_the_server_that_runs_here_needs_no_address(stack, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("THERMOCLINE_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("THERMOCLINE_URL", raising=False)
    run, doctor = CliRunner(), ["doctor", "--set", "engine.kind=fake", "--json"]
    with announced(tmp_path, stack.url):
        shown = run.invoke(app, ["connect", "claude"])
        assert f"export ANTHROPIC_BASE_URL='{stack.url}'" in shown.output
        port = ["--set", f"gateway.port={stack.port}"]
        found = {x["about"]: x for x in json.loads(run.invoke(app, [*doctor, *port]).output)}
        assert found["server"]["text"].startswith(f"{stack.url} packs sessions with words:")
        assert "is that of the server which runs here" in found["port"]["text"]
        alone, verb = (run.invoke(app, ["sessions", *x, "--json"]) for x in ([], ["list"]))
        assert (alone.exit_code, alone.output) == (0, verb.output)
    found = {x["about"]: x for x in json.loads(run.invoke(app, doctor).output)}
    assert found["server"] == {"about": "server", "verdict": "ok", "text": "none runs here"}


def test_doctor_and_sessions_find_the_server_that_is_named(stack, tmp_path, monkeypatch):
    monkeypatch.setenv("THERMOCLINE_DATA_DIR", str(tmp_path))
    run, doctor = CliRunner(), ["doctor", "--set", "engine.kind=fake", "--json"]

    def server(*options: str) -> dict[str, str]:
        found = json.loads(run.invoke(app, [*doctor, *options]).output)
        return {x["about"]: x for x in found}["server"]

    assert server("--url", f"{stack.url}/v1")["text"].startswith(f"{stack.url} packs sessions")
    listed = run.invoke(app, ["sessions", "--url", stack.url])
    assert (listed.exit_code, listed.output) == (0, "no sessions\n")
    monkeypatch.setenv("THERMOCLINE_URL", stack.url)
    assert server()["text"].startswith(f"{stack.url} packs sessions")
    monkeypatch.setenv("THERMOCLINE_URL", GONE)
    assert server()["verdict"] == "warning"
    assert server()["text"] == f"no server of ours answers at {GONE} (--url, THERMOCLINE_URL)"


@pytest.mark.parametrize("content", [b"<html>", b"{}", b'{"object": "list", "codec": 3}'])
def test_a_server_of_another_kind_is_none_of_ours(content: bytes, tmp_path: Path) -> None:
    environ = {"THERMOCLINE_DATA_DIR": str(tmp_path)}
    with saying(http_ok(content)) as address, announced(tmp_path, f"http://{address}"):
        assert ask_server(environ) == ""
    with announced(tmp_path, GONE):
        assert ask_server(environ) == ""


def test_a_server_that_wants_a_key_is_known_for_one(tmp_path: Path) -> None:
    keys = {"gateway": {"api_keys": ["t:" + "0" * 64]}}
    environ = {"THERMOCLINE_DATA_DIR": str(tmp_path)}
    with FakeStack(tmp_path / "stack", **keys) as stack, announced(tmp_path, stack.url):
        assert "wants a key (THERMOCLINE_API_KEY)" in ask_server(environ)
