"""Markdown that every generated page is made of: a head that warns, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WARNING = (
    "<!-- Written by `make reference` from the code. Do not edit: the next run would undo it. -->"
)


def page(title: str, *parts: str) -> str:
    """Join the parts of a page under its title."""
    return "\n\n".join([f"# {title}", WARNING, *(part.strip("\n") for part in parts)]) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table; a bar inside a cell is escaped."""
    lines = [_row(heads), "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(_row(row) for row in rows)])


def code(text: str) -> str:
    """Write ``text`` as code; nothing for an empty text."""
    return f"`{text}`" if text else ""


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
