"""The names that ``thermocline`` offers, and the cost of importing it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import thermocline

PUBLIC = """
CodecInfo Corrupt KVLayer KVLayout Method Mismatch Packed Parameter Profile Quality Samples
UnknownCodec codebook codec codecs judge layout_of learn per_layer register
simple
"""


def test_the_public_names_are_these():
    assert thermocline.__all__ == PUBLIC.split()
    assert set(PUBLIC.split()) <= set(dir(thermocline))


@pytest.mark.parametrize("name", PUBLIC.split())
def test_every_name_is_there_and_documented(name):
    assert getattr(thermocline, name).__doc__


def test_type_checkers_are_given_the_same_table():
    """mypy reads the imports that never run; they must have the names of the table."""
    tree = ast.parse(Path(thermocline.__file__ or "").read_text())
    imports = [
        node
        for x in tree.body
        if isinstance(x, ast.If)
        for node in x.body
        if isinstance(node, ast.ImportFrom)
    ]
    assert {alias.name: x.module for x in imports for alias in x.names} == thermocline.NAMES


def test_importing_it_imports_nothing_else():
    assert loaded_by("import thermocline") & {"numpy", "kvstore", "numba", "mlx", "torch"} == set()


def test_a_method_needs_no_server_and_no_tensor_library():
    loaded = loaded_by("import thermocline; thermocline.codec('tq3')")
    assert not loaded & {"gateway", "scheduler", "fastapi", "aiohttp", "mlx", "torch"}


def loaded_by(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())
