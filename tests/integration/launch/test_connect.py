"""``thermocline connect`` asks a running server for the values that it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from launch.cli.main import app


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
