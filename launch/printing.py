"""Prints lines and tables for people, and JSON for programs, to the terminal or into a file.

An output path that is not a regular file (a pipe, ``/dev/stdout``) is written directly.

Names from servers and files may contain control characters, which are replaced.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.errors import LaunchError, UsageError

# Without a terminal no line is cut to a screen's width: a pipe's reader wants whole lines.
_PIPE_WIDTH = 240


def safe(text: str) -> str:
    """Replace the control characters of ``text`` that a terminal would obey."""
    return "".join(x if x.isprintable() or x in "\n\t" else "?" for x in text)


def one_line(text: str) -> str:
    """Replace all control characters of ``text``, line breaks and tabs included."""
    return "".join(x if x.isprintable() else "?" for x in text)


def say(text: str = "", *, error: bool = False) -> None:
    """Print text and flush it; with ``error`` to standard error."""
    print(safe(text), file=sys.stderr if error else sys.stdout, flush=True)


def print_json(content: Any) -> None:
    text = msgspec.json.format(msgspec.json.encode(content)).decode()
    if not text.isascii():  # msgspec escapes only ASCII control characters
        text = "".join(x if x.isprintable() or x == "\n" else json.dumps(x)[1:-1] for x in text)
    print(text)


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
    screen = console()
    if screen.is_terminal:
        screen.print(table)
        return
    with screen.capture() as printed:
        screen.print(table)
    for line in printed.get().splitlines():
        say(line.rstrip())


def console() -> Console:
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def check_output(option: str, path: Path) -> None:
    """Check that ``path`` can be written. Raises ``UsageError`` if it cannot."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"{option} {path}: this is a folder; give the name of a file")
    if not _is_special(path) and not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: nothing may be written into {path.parent}")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to ``path`` when the block ends.

    Readers see the old file until the new one is complete. Raises ``LaunchError`` if the file
    cannot be written.
    """
    if _is_special(path):
        yield path
        return
    target = path.resolve()  # a symbolic link is kept, and its target replaced
    fresh = target.with_name(f".{target.stem}.{os.getpid()}.new{target.suffix}")
    try:
        yield fresh
        fresh.replace(target)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error}") from error
    finally:
        fresh.unlink(missing_ok=True)


def write_json(content: msgspec.Struct, path: Path) -> None:
    """Write ``content`` as indented JSON. Raises ``LaunchError`` if that fails."""
    with whole_file(path) as file:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
