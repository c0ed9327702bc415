"""The codes of all errors, found in the calls in the sources that make errors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# By function: the positions of the code and of the status, and the status if none is given.
MAKERS = {"Failure": (3, 0, 0), "InvalidRequest": (2, 3, 400), "error_body": (3, None, 0)}
FOLDERS = ("gateway", "engines/openai", "engines/mlx_worker", "engines/http.py")


class ErrorCode(NamedTuple):
    """A code that clients see, and a status that comes with it; 0 if the call has none."""

    code: str
    status: int


def error_codes() -> set[ErrorCode]:
    """Return the codes and statuses that are constants in a call that makes an error."""
    return {found for folder in FOLDERS for path in _files(folder) for found in _codes_in(path)}


def _files(folder: str) -> list[Path]:
    path = ROOT / folder
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _codes_in(path: Path) -> Iterator[ErrorCode]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in MAKERS
        ):
            code_at, status_at, usual = MAKERS[node.func.id]
            code = _constant(node, code_at, "code")
            if isinstance(code, str):
                status = _constant(node, status_at, "status")
                yield ErrorCode(code, status if isinstance(status, int) else usual)


def _constant(call: ast.Call, place: int | None, keyword: str) -> object:
    for given in call.keywords:
        if given.arg == keyword and isinstance(given.value, ast.Constant):
            return given.value.value
    if place is None or len(call.args) <= place:
        return None
    argument = call.args[place]
    return argument.value if isinstance(argument, ast.Constant) else None
