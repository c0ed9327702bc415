"""``thermocline connect`` asks a running server for the values that it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from launch.cli.main import app
from launch.machine.server_address import announced


def test_connect_shows_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    run = CliRunner()
    with FakeStack(tmp_path / "stack") as stack:
        shown = run.invoke(app, ["connect", "claude", "--url", stack.url])
        written = run.invoke(app, ["connect", "claude", "--url", f"{stack.url}/", "--write"])
        by_hand = run.invoke(app, ["connect", "cline", "--url", stack.url, "--write"])
    assert f"export ANTHROPIC_BASE_URL='{stack.url}'" in shown.output
    assert written.exit_code == 0, written.output
    env = json.loads((home / ".claude" / "settings.json").read_text())["env"]
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_MODEL"]) == (stack.url, MODEL)
    assert by_hand.exit_code != 0


def test_the_server_that_runs_here_needs_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("THERMOCLINE_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("THERMOCLINE_URL", raising=False)
    run, doctor = CliRunner(), ["doctor", "--set", "engine.kind=fake", "--json"]
    with FakeStack(tmp_path / "stack") as stack, announced(tmp_path, stack.url):
        shown = run.invoke(app, ["connect", "claude"])
        assert f"export ANTHROPIC_BASE_URL='{stack.url}'" in shown.output
        port = ["--set", f"gateway.port={stack.port}"]
        found = {x["about"]: x for x in json.loads(run.invoke(app, [*doctor, *port]).output)}
        assert found["server"]["text"].startswith(f"{stack.url} serves {MODEL}, and packs with")
        assert "is that of the server which runs here" in found["port"]["text"]
    found = {x["about"]: x for x in json.loads(run.invoke(app, doctor).output)}
    assert found["server"] == {"about": "server", "verdict": "ok", "text": "none runs here"}
