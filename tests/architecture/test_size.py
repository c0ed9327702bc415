"""Small files, short functions: a budget that is a test stays kept."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from statistics import median, quantiles

import pytest

from tests.architecture.sources import FILES, PACKAGES, ROOT, tree_of

pytestmark = pytest.mark.share("sources")

MAX_LINES = 400


def function_lengths(path: Path) -> list[int]:
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_a_file_fits_its_budget_and_says_what_it_is():
    long, mute = [], []
    for path in FILES:
        text = path.read_text()
        if len(text.splitlines()) > MAX_LINES:
            long.append(path)
        if path.name != "__main__.py" and text.strip() and not ast.get_docstring(tree_of(path)):
            mute.append(path)  # a module begins with its purpose
    assert len(FILES) > 400 and (long, mute) == ([], [])


@pytest.mark.parametrize("room", PACKAGES)
def test_functions_are_short(room):
    files = (path for path in FILES if path.relative_to(ROOT).parts[0] == room)
    lengths = [length for path in files for length in function_lengths(path)]
    assert median(lengths) < 15
    assert quantiles(lengths, n=10)[-1] <= 40


def test_no_name_of_a_class_is_used_twice():
    classes = Counter(
        node.name
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in classes.items() if count > 1} == set()
