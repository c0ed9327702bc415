"""The product's files, read once for the tests that look at all of them."""

from __future__ import annotations

import ast
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("thermocline", "gateway", "engines", "kvstore", "scheduler", "launch")
FILES = sorted(chain.from_iterable((ROOT / x).rglob("*.py") for x in PACKAGES))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the parsed file. Tests with the mark ``share("sources")`` run in one process."""
    return ast.parse(path.read_text(encoding="utf-8"))
