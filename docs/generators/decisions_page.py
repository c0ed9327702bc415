"""``docs/decisions/index.md``: the titles of all decisions."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generators.tables import page, table

INTRODUCTION = """
The reasons for the design: one page for each choice, with the measurements and the alternatives
that were not taken. They are for developers of the code; users do not need them. Numbers have gaps:
at first each package had a range of its own, and some decisions were withdrawn.
"""
FOLDER = Path(__file__).parents[1] / "decisions"


def decisions_page() -> str:
    rows = []
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        number, words = re.split(r"[.:]\s+", title, maxsplit=1)
        if not words.startswith("vLLM"):
            words = words[0].upper() + words[1:]
        rows.append((str(int(number)), f"[{words}]({path.name})"))
    return page("Decisions", INTRODUCTION, table(("", "decision"), rows))
