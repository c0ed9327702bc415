"""A stranger finds the room of a change: small files and folders, short functions, plain words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import median, quantiles

import pytest

from tests.architecture.sources import FILES, PACKAGES, ROOT, tree_of

pytestmark = pytest.mark.share("sources")

ROOMS = ("gateway", "engines", "kvstore", "scheduler", "launch")
FOLDERS = sorted(
    path.parent for path in chain.from_iterable((ROOT / x).rglob("__init__.py") for x in ROOMS)
)
MAX_MODULES = 12
MAX_SENTENCE = 100
MAX_PARAMETERS = 8
# A sentence that starts so has lost its subject or its verb: "Of a session ...", "Until cancelled."
FRAGMENT_WORDS = """
About After Again Also Among As At Because Before Behind Beside Between Both By Else For From How If
In Into Of On Only Out Over Since So Such Than That Then Those Through To Under Until What When
Where Whether Which While Who Whom Whose Why With
"""


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_folder_can_be_taken_in_at_a_glance():
    for package in FOLDERS:
        modules = [x.name for x in package.glob("*.py") if x.stem not in ("__init__", "__main__")]
        assert len(modules) <= MAX_MODULES, (package, modules)


def test_a_package_says_in_a_sentence_what_it_is_for():
    for package in FOLDERS:
        tree = tree_of(package / "__init__.py")
        text = ast.get_docstring(tree)
        assert text, f"{package}: a package begins with its purpose"
        assert len(tree.body) == 1, f"{package}: no code in __init__"
        sentence = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0]
        assert len(sentence) <= MAX_SENTENCE, (package, sentence)


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
    for path, node in definitions():
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            args = node.args
            number = len(args.posonlyargs + args.args + args.kwonlyargs) - 1  # without ``self``
            assert number <= MAX_PARAMETERS, (path, node.lineno)


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


ROOT = Path(__file__).parents[2]
BOUNDS = {
    r"behind": 0.26,  # for "after"
    r"nobody|somebody|someone|anybody": 0.04,
    r"(?:of|for|by|to|with|from|and|says|is|in) what": 0.10,  # as a noun
    r"tell|tells|told|telling": 0.12,
    r"whoever|whatever|whichever": 0.22,
}


def prose_of(source: str) -> Iterator[str]:
    """The comments and the strings in three quotes."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_doc = token.type == tokenize.STRING and token.string.lstrip("rbfu").startswith('"""')
        if token.type == tokenize.COMMENT or is_doc:
            yield token.string


@cache
def prose() -> str:
    files = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return "\n".join("\n".join(prose_of(path.read_text())) for path in files)


@pytest.mark.parametrize("words", BOUNDS)
def test_words_of_a_dialect_are_rare(words):
    found = re.findall(rf"\b(?:{words})\b", prose(), re.IGNORECASE)
    share = 1000 * len(found) / len(prose().split())
    assert share <= BOUNDS[words], f"{len(found)} times {words}: name the thing or the actor"
