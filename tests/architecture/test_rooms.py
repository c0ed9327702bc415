"""A stranger finds the room of a change: few files in a folder, plain words over each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, tree_of

pytestmark = pytest.mark.share("sources")

ROOMS = ("gateway", "engines", "kvstore", "scheduler", "launch")
PACKAGES = sorted(
    path.parent for path in chain.from_iterable((ROOT / x).rglob("__init__.py") for x in ROOMS)
)
MAX_MODULES = 12
MAX_SENTENCE = 100
MAX_PARAMETERS = 8
# Constructors that may take more, and why: "path/of/module.py Class" -> reason. None so far.
MORE_PARAMETERS: dict[str, str] = {}
# A sentence that starts so has lost its subject or its verb: "Of a session ...", "Until cancelled."
FRAGMENT_WORDS = """
About After Again Also Among As At Because Before Behind Beside Between Both By Else For From How If
In Into Of On Only Out Over Since So Such Than That Then Those Through To Under Until What When
Where Whether Which While Who Whom Whose Why With
"""


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_folder_can_be_taken_in_at_a_glance():
    for package in PACKAGES:
        modules = [x.name for x in package.glob("*.py") if x.stem not in ("__init__", "__main__")]
        assert len(modules) <= MAX_MODULES, (package, modules)


def test_no_exception_outlives_its_need():
    assert set(MORE_PARAMETERS) <= {f"{path} {name}" for path, name, _ in constructors()}


def test_a_package_says_in_a_sentence_what_it_is_for():
    for package in PACKAGES:
        tree = tree_of(package / "__init__.py")
        text = ast.get_docstring(tree)
        assert text, f"{package}: a package begins with its purpose"
        assert len(tree.body) == 1, f"{package}: no code in __init__"
        sentence = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0]
        assert len(sentence) <= MAX_SENTENCE, (package, sentence)


def constructors() -> Iterator[tuple[str, str, int]]:
    """Path, class and number of parameters (``self`` not counted) of every ``__init__``."""
    for path, node in classes():
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                args = method.args
                yield path, node.name, len(args.posonlyargs + args.args + args.kwonlyargs) - 1


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, node in definitions():
        if isinstance(node, ast.ClassDef):
            yield path, node


def definitions(room: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node of the product's (or one room's) sources, with its file's path."""
    for path, nodes in parsed():
        if path.startswith(room):
            for node in nodes:
                yield path, node


@cache
def parsed() -> list[tuple[str, list[ast.AST]]]:
    files = sorted(chain.from_iterable((ROOT / x).rglob("*.py") for x in ROOMS))
    return [(names(path), list(ast.walk(tree_of(path)))) for path in files]


def test_constructors_take_few_parameters():
    found = [
        f"{path} {name}: {number}"
        for path, name, number in constructors()
        if number > MAX_PARAMETERS and f"{path} {name}" not in MORE_PARAMETERS
    ]
    assert found == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_docstring_starts_as_a_fragment(room):
    """The first word only, so it is a hint and no judge: read what it passes as well."""
    found, fragments = [], set(FRAGMENT_WORDS.split())
    for path, node in definitions(f"{room}/"):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text and text.split()[0].rstrip(".,:;") in fragments:
                found.append(f"{path}:{node.lineno} {node.name}: {text.splitlines()[0]}")
    assert found == []
