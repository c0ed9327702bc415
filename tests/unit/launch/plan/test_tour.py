"""The tour shows for other machines the output of ``plan``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.command_line import program
from tests.unit.launch.plan.published import PUBLISHED

TOUR = (Path(__file__).parents[4] / "docs" / "tour.md").read_text("utf-8")
COMMAND = "$ thermocline plan Qwen3-32B --machines --weights 62GiB --context 8192\n"


def test_the_tour_shows_the_plan_for_other_machines(tmp_path):
    (tmp_path / "Qwen3-32B").mkdir()
    config = json.dumps(PUBLISHED["Qwen3-32B"])
    (tmp_path / "Qwen3-32B" / "config.json").write_text(config)
    before, command, after = TOUR.partition(COMMAND)
    shown = after.partition("...\n```")[0].splitlines()
    assert command and len(shown) == 7

    asked = COMMAND.split()[2:]
    done = program(
        sys.executable,
        "-m",
        "launch",
        *asked,
        cwd=tmp_path,
        env={"COLUMNS": "160", "PATH": "", "HOME": str(tmp_path)},
    )
    assert [line.rstrip() for line in done.stdout.splitlines()[: len(shown)]] == shown, done.stderr
