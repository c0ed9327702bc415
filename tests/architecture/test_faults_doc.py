"""The catalogue of faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.planted.__main__ import table

ROOT = Path(__file__).parents[2]


def test_every_test_of_the_catalogue_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "faults.md").read_text()))
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert len(named) > 60
    assert sorted(named - there) == []


def test_the_catalogue_has_every_case() -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 59))
    assert [x for x in rows if not re.match(r"holds(?!, partly)", x[1])] == []


def test_each_planted_defect_fits_the_code() -> None:
    """What replaces code that a defect breaks has a defect of its own, or the old entry goes."""
    stale = [str(x) for x in table() if any(edit.is_stale(ROOT) for edit in x.edits)]
    assert len(table()) > 90 and stale == []
