"""The claims of the projects from which this one grew, as the page has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import seeds

PAGE = Path(__file__).parents[3] / "docs" / "seeds.md"


def test_errors_of_levels_are_the_known_ones() -> None:
    """Max, Quantizing for minimum distortion, 1960: 8 levels of a normal variable."""
    assert seeds.lloyd_max_error(3) == pytest.approx(0.03454, abs=1e-4)
    assert seeds.best_uniform_error(8) == pytest.approx(0.03744, abs=1e-4)


def test_bits_of_one_row_more() -> None:
    assert seeds.bits("manthan", 256) == 8 * 100 / 256
    assert seeds.bits("tq3", 128) == 8 * 50 / 128


def test_the_page_has_every_claim_with_its_verdict(tmp_path: Path) -> None:
    out = tmp_path / "claims.json"
    seeds.main(["--json", str(out)])
    claims = json.loads(out.read_text())
    page = PAGE.read_text()
    for found in claims:
        line = next((x for x in page.splitlines() if f"| {found['claim']} |" in x), "")
        assert line.endswith(f"| {found['verdict']} |"), "run: python -m benchmarks.seeds --write"
