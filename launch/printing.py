"""Prints tables for people and JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Without a terminal no line is cut to a screen's width: a pipe's reader wants whole lines.
_PIPE_WIDTH = 240


def print_json(content: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(content)).decode() + "\n")


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    empty: str = "",
) -> None:
    """Print a table. Cells are plain text: markup and control characters in them have no effect."""
    if not rows and empty:
        print(empty)
        return
    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text("".join(x if x.isprintable() else "?" for x in cell)) for cell in row))
    console().print(table)


def console() -> Console:
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)
