"""Generated pages say what the code does, and other pages do not contradict them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import thermocline
from docs.generators.errors_page import MEANINGS, MISS_MEANINGS, all_codes
from docs.generators.headers_page import PRIVATE, described_headers, headers_in_sources
from docs.generators.pages import DOCS, PAGES
from launch.errors import UsageError
from launch.settings.schema import Settings, flat
from launch.settings.sources import Fields
from scheduler.session import TRANSITIONS, Event, State
from tests.planted.__main__ import table

ROOT = Path(__file__).parents[2]
CONFIGURATION = DOCS / "configuration.md"


@pytest.mark.parametrize("path", PAGES, ids=lambda x: str(x.relative_to(DOCS)))
def test_a_generated_page_is_what_the_code_says(path):
    written = PAGES[path]()
    assert path.exists() and path.read_text("utf-8") == written, "run: make reference"


def test_every_code_of_an_error_has_its_meaning():
    codes = {found.code for found in all_codes()}
    assert codes - set(MEANINGS) == set()
    assert set(MEANINGS) - codes == set()
    assert len(codes) > 30


def test_every_reason_of_a_miss_has_its_meaning():
    page = (DOCS / "reference" / "errors.md").read_text("utf-8")
    assert all(f"| `{reason}` | {meaning} |" in page for reason, meaning in MISS_MEANINGS.items())


def test_the_table_of_methods_has_all_of_them():
    page = (DOCS / "methods.md").read_text("utf-8")
    aliases = {"raw", "tq"}  # no loss; tq3 under its general name
    missing = [x for x in thermocline.codecs() if f"| `{x}` |" not in page and x not in aliases]
    assert missing == [], "run: python -m benchmarks.methods --write docs/methods.md"


def test_every_header_is_described():
    found = headers_in_sources()
    assert len(found) > 15
    assert found - described_headers() - PRIVATE == set()
    assert found >= PRIVATE


def test_no_header_is_described_that_no_source_names():
    text = "".join(path.read_text("utf-8").lower() for path in (ROOT / "gateway").rglob("*.py"))
    text += (ROOT / "engines" / "http.py").read_text("utf-8").lower()
    # The names of limits are put together from two words.
    named = {re.sub(r"-(limit|remaining|reset)-\*$", "", name) for name in described_headers()}
    assert [name for name in sorted(named) if name not in text] == []


def test_the_defaults_in_the_configuration_page_are_those_of_the_code():
    """Only what can be read as a value of its setting: others are said in words."""
    values, fields, compared = flat(Settings()), Fields(Settings), 0
    for names, cells in documented_defaults():
        for name, cell in zip(names, cells, strict=True):
            try:
                written = fields.value(name, cell, "the page", is_text=True).value
            except UsageError:
                continue
            expected = {"on": True}.get(cell, values[name])
            if isinstance(expected, int | float):
                assert written == expected, name
                compared += 1
    assert compared > 25


def documented_defaults() -> list[tuple[list[str], list[str]]]:
    """Names and defaults of rows that have as many of one as of the other."""
    rows = []
    for line in CONFIGURATION.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        names = re.findall(r"`([a-z_.]+)`", cells[0]) if len(cells) == 3 else []
        if names and all(name in Fields(Settings).types for name in names):
            defaults = [re.sub(r"(?<=\d),(?=\d{3})", "", x) for x in cells[1].split(", ")]
            defaults = [x.partition(" = ")[0].strip("` ") for x in defaults]
            if len(defaults) == len(names):
                rows.append((names, defaults))
    return rows


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


PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_the_documented_table_is_the_real_one():
    rows = [line.split() for line in PAGE.read_text().splitlines()]
    header = next(row for row in rows if row[:2] == ["TURN", "QUIET"])
    assert header == [event.name for event in Event]
    for state in State:
        expected = [TRANSITIONS[state].get(event) for event in Event]
        words = [target.value if target else "." for target in expected]
        assert [state.value, *words] in rows
