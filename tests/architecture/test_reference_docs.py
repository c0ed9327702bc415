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
