"""Tables of Markdown, and the place of one in a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def replace_table(page: Path, text: str) -> None:
    """Replace the text between the two marks of a page.

    Raises:
        ValueError: the page lacks one of them.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no table to replace: {BEGIN} ... {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
