"""The claims and capabilities of the projects from which this one grew, as the page has them."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

import thermocline
from benchmarks import seeds
from launch.cli.main import app

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "seeds.md"


STATES = {
    "holds": "hold",
    "in part": "in part",
    "no": "do not hold",
    "waits": "wait for hardware",
    "outside": "outside",
}
CELLS = re.compile(rf"\| ({'|'.join(STATES)}) \| (.+) \|(.*)\| `(.+)` \|")
ROWS = [found.groups() for x in PAGE.read_text().splitlines() if (found := CELLS.fullmatch(x))]
SHOWN = sorted({row[3] for row in ROWS})
COMMAND = ("python -m ", "thermocline ")
FILE = ("tests/", "docs/")
FIELDS = ("group", "nbytes")  # words of small letters that name no method
EXPRESSIONS = [x for x in SHOWN if not x.startswith(COMMAND + FILE)]


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


@functools.cache
def names_of_the_page() -> dict[str, Any]:
    """Runs the lines that the page's expressions follow."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1], names)
    return names


def test_the_page_counts_its_capabilities() -> None:
    counts = Counter(row[0] for row in ROWS)
    parts = ", ".join(f"{counts[state]} {words}" for state, words in STATES.items())
    assert f"{len(ROWS)} rows: {parts}." in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_capability_is_there(expression: str) -> None:
    assert eval(expression, names_of_the_page())


def test_what_shows_a_capability_exists() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for shown in SHOWN:
        if shown.startswith(FILE):
            path, _, test = shown.partition("::")
            assert (ROOT / path).exists(), shown
            assert not test or f"def {test}(" in (ROOT / path).read_text(), shown
        elif shown.startswith("python -m "):
            assert find_spec(shown.split()[2]), shown
        elif shown.startswith("thermocline "):
            assert shown.split()[1] in commands, shown


def test_methods_that_are_named_exist() -> None:
    """A name with parameters, and one word of small letters, is a method or a public name."""
    named = {x for row in ROWS for x in re.findall(r"`([a-z]+\d*)[:`]", row[2])}
    assert len(named) > 20
    assert {x for x in named if x not in thermocline.codecs()} <= {*thermocline.__all__, *FIELDS}
