"""No import cycles: a module can be read without those that import it.

Imports inside functions count: they are still arrows that a reader has to follow. Those under
``TYPE_CHECKING`` do not, nor what a table names by an import string.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES, ROOT, tree_of

pytestmark = pytest.mark.share("sources")


def modules_of(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_in(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from imports_in(other)
        else:
            yield from imports_in(child)


def names_in(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yields names that may be modules, the longest first."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    else:
        for alias in node.names:
            yield f"{node.module}.{alias.name}"
        yield str(node.module)


def graph_of(modules: dict[str, Path]) -> dict[str, set[str]]:
    graph = {}
    for name, path in modules.items():
        targets = {x for node in imports_in(tree_of(path)) for x in names_in(node)}
        graph[name] = {x for x in targets if x in modules and x != name}
    return graph


def cycles_in(graph: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan's strongly connected components of more than one module, sorted."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in numbers:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], numbers[target])
        if lowest[name] == numbers[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                cycles.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in numbers:
            visit(name)
    return sorted(cycles)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_by_way_of_others(package):
    assert cycles_in(graph_of(modules_of(ROOT, (package,)))) == []


def test_cycles_are_found(tmp_path):
    folder = tmp_path / "room"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text("from room import b\n")
    (folder / "b.py").write_text("def later():\n    from room.c import x\n")
    (folder / "c.py").write_text("import room.a\nx = 1\n")
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from room.e import y\n"
    (folder / "d.py").write_text(typed)
    (folder / "e.py").write_text("from room import d\ny = 1\n")
    found = cycles_in(graph_of(modules_of(tmp_path, ("room",))))
    assert found == [["room.a", "room.b", "room.c"]]
