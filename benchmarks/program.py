"""Shared by all programs: options, figures as JSON, and tables of Markdown."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def options_of(doc: str | None, line: str) -> argparse.ArgumentParser:
    """Return a parser of the options that ``line`` lists with their defaults, and of ``--json``.

    ``--sessions 24 --engine mlx|vllm --lengths 10 20 --codecs tq3 ... --folder PATH --plain`` are a
    number, a choice of which the first is the default, two options of several values, a path or
    None, and a flag. ``--help`` prints ``doc``.
    """
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=kind)
    for option in f"{line} --json PATH".split("--")[1:]:
        name, *values = shlex.split(option)
        asked: dict[str, Any] = {"action": "store_true"}
        if values == ["PATH"]:
            asked = {"type": Path}
        elif len(values) > 1:
            defaults = [_value(x) for x in values if x != "..."]
            asked = {"type": type(defaults[0]), "default": defaults, "nargs": "+"}
        elif values and "|" in values[0]:
            choices = values[0].split("|")
            asked = {"choices": choices, "default": choices[0]}
        elif values:
            default = _value(values[0])
            asked = {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", **asked)
    return parser


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def arguments(doc: str | None, line: str) -> argparse.Namespace:
    """Parse the command line by the options of ``options_of``."""
    return options_of(doc, line).parse_args()


def write_json(path: Path | None, result: dict[str, Any] | list[Any]) -> None:
    """Print figures as JSON, and write them to ``path`` unless it is None."""
    text = json.dumps(result, indent=2, default=str)
    print(text)
    if path:
        path.write_text(f"{text}\n")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(map(str, cells))} |" for cells in (head, rule, *rows)]


def replace_table(page: Path, text: str) -> None:
    """Replace the text between the two marks of a page.

    Raises:
        ValueError: the page lacks one of the marks.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no table to replace: {BEGIN} ... {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
