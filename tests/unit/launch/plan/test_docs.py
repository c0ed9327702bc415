"""Pages show the output and the figures of today's ``plan``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import plan_sentences, plan_table
from launch.families.table import FAMILIES, NESTED, REFUSED
from tests.command_line import program
from tests.unit.launch.plan.published import PUBLISHED

DOCS = Path(__file__).parents[4] / "docs"
BENCH, MODELS = DOCS / "bench.md", DOCS / "models.md"
TOUR = (DOCS / "tour.md").read_text("utf-8")
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


@pytest.mark.slow
def test_the_sentences_are_todays():
    assert "\n".join(plan_sentences.markdown()) in BENCH.read_text("utf-8")


def test_the_figures_are_todays():
    assert "\n".join(plan_table.markdown()) in MODELS.read_text()


def test_families_are_called_as_the_table_calls_them():
    section = (
        MODELS.read_text().partition("## How layers keep KV")[2].partition("Attention sinks")[0]
    )
    lines = [x.split("|")[3] for x in section.splitlines() if x.startswith("|")][2:]
    words = {w for line in lines for w in line.replace(",", " ").replace(";", " ").split()}
    known = {*FAMILIES, *NESTED, *REFUSED}
    # Types have digits or underscores in their names, plain words have not.
    named = {w for w in words if "_" in w or any(c.isdigit() for c in w)} - {"mlx_lm"}
    assert named and named <= known


def test_a_codec_gains_as_much_as_the_growing_layers():
    found = {(x["model"], x["tokens"]): x for x in plan_table.rows()}
    dense = found["Llama-3.1-8B", 32768]
    assert dense["live_bytes"] / dense["dense3_bytes"] > 5
    hybrid = found["Qwen3.5-35B-A3B", 32768]
    assert hybrid["state_bytes"] > 0.4 * hybrid["dense3_bytes"]
    latents = found["DeepSeek-V3", 8192]
    assert latents["live_bytes"] / latents["dense3_bytes"] > 4.5
