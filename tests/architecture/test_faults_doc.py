"""The catalogue of faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

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
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    assert [int(x) for x in rows] == list(range(1, 59))
