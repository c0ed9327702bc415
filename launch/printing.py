"""Prints lines and tables for people and JSON for programs.

Names that servers and files give may hold characters that a terminal obeys; none reaches it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Without a terminal no line is cut to a screen's width: a pipe's reader wants whole lines.
_PIPE_WIDTH = 240


def safe(text: str) -> str:
    """Replace the control characters of ``text`` that a terminal would obey."""
    return "".join(x if x.isprintable() or x in "\n\t" else "?" for x in text)


def one_line(text: str) -> str:
    """Replace all control characters of ``text``, line breaks and tabs included."""
    return "".join(x if x.isprintable() else "?" for x in text)


def say(text: str = "", *, error: bool = False) -> None:
    """Print lines of text; with ``error`` to standard error."""
    print(safe(text), file=sys.stderr if error else sys.stdout, flush=error)


def print_json(content: Any) -> None:
    text = msgspec.json.format(msgspec.json.encode(content)).decode()
    if not text.isascii():  # others of JSON's control characters are escaped
        text = "".join(x if x.isprintable() or x == "\n" else json.dumps(x)[1:-1] for x in text)
    sys.stdout.write(text + "\n")


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    empty: str = "",
) -> None:
    """Print a table. Cells are plain text: markup and control characters in them have no effect."""
    if not rows and empty:
        say(empty)
        return
    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    console().print(table)


def console() -> Console:
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)
