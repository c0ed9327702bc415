"""Small files, short functions: a budget that is a test stays kept."""

from __future__ import annotations

import ast
from collections import Counter
from itertools import chain
from pathlib import Path
from statistics import median, quantiles

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("thermocline", "gateway", "engines", "kvstore", "scheduler", "launch")
FILES = sorted(chain.from_iterable((ROOT / room).rglob("*.py") for room in ROOMS))
MAX_LINES = 400


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def function_lengths(path: Path) -> list[int]:
    tree = ast.parse(path.read_text())
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@pytest.mark.parametrize("path", FILES, ids=names)
def test_a_file_fits_its_budget_and_says_what_it_is(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    if path.name != "__main__.py" and text.strip():
        assert ast.get_docstring(ast.parse(text)), "a module begins with its purpose"


@pytest.mark.parametrize("room", ROOMS)
def test_functions_are_short(room):
    files = (path for path in FILES if path.relative_to(ROOT).parts[0] == room)
    lengths = [length for path in files for length in function_lengths(path)]
    assert median(lengths) < 15
    assert quantiles(lengths, n=10)[-1] <= 40


def test_no_name_of_a_class_is_used_twice():
    classes = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in classes.items() if count > 1} == set()
