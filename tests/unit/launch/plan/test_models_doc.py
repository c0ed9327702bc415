"""The tables of docs/models.md are those of today's arithmetic."""

from __future__ import annotations

from pathlib import Path

from benchmarks.plan_table import markdown, rows
from launch.families.table import FAMILIES, NESTED, REFUSED

DOC = Path(__file__).parents[4] / "docs" / "models.md"


def test_the_figures_are_todays():
    assert "\n".join(markdown()) in DOC.read_text()


def test_families_are_called_as_the_table_calls_them():
    section = DOC.read_text().partition("## How layers keep KV")[2].partition("Attention sinks")[0]
    lines = [x.split("|")[3] for x in section.splitlines() if x.startswith("|")][2:]
    words = {w for line in lines for w in line.replace(",", " ").replace(";", " ").split()}
    known = {*FAMILIES, *NESTED, *REFUSED}
    # Types have digits or underscores in their names, plain words have not.
    named = {w for w in words if "_" in w or any(c.isdigit() for c in w)} - {"mlx_lm"}
    assert named and named <= known


def test_a_codec_gains_as_much_as_the_growing_layers():
    found = {(x["model"], x["tokens"]): x for x in rows()}
    dense = found["Llama-3.1-8B", 32768]
    assert dense["live_bytes"] / dense["dense3_bytes"] > 5
    hybrid = found["Qwen3.5-35B-A3B", 32768]
    assert hybrid["state_bytes"] > 0.4 * hybrid["dense3_bytes"]
    latents = found["DeepSeek-V3", 8192]
    assert latents["live_bytes"] / latents["dense3_bytes"] > 4.5
