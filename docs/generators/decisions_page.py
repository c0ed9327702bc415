"""``docs/decisions/index.md``: the titles of all decisions."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generators.tables import page, table

INTRODUCTION = """
Why things are as they are: one page for each choice, with what was measured and what was left
aside. They are for developers of the code; users do not need them. Numbers have gaps:
rooms were counted apart.
"""
FOLDER = Path(__file__).parents[1] / "decisions"


def decisions_page() -> str:
    rows = []
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        number, words = re.split(r"[.:]\s+", title, maxsplit=1)
        rows.append((str(int(number)), f"[{words[0].upper()}{words[1:]}]({path.name})"))
    return page("Decisions", INTRODUCTION, table(("", "decision"), rows))
