"""The changelog keeps its form, and the version that is shipped has its place in it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
RELEASE = re.compile(r"## \[(Unreleased|\d+\.\d+\.\d+)\](?: - \d{4}-\d{2}-\d{2})?")


def test_releases_have_a_number_and_a_date_newest_first():
    heads = [line for line in LINES if line.startswith("## ")]
    found = [RELEASE.fullmatch(head) for head in heads]
    assert all(found), heads
    assert heads[0] == "## [Unreleased]"
    assert all(" - " in head for head in heads[1:])
    numbers = [tuple(map(int, x[1].split("."))) for x in found[1:] if x]
    assert numbers == sorted(set(numbers), reverse=True)


def test_a_version_that_was_released_is_the_newest_in_the_changelog():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    released = [found[1] for line in LINES if (found := RELEASE.fullmatch(line))][1:]
    assert not released or released[0] == version


def test_every_release_has_each_section_once():
    seen: set[str] = set()
    for line in LINES:
        if line.startswith("## "):
            seen = set()
        elif line.startswith("### "):
            name = line.removeprefix("### ")
            assert name in SECTIONS - seen
            seen.add(name)
