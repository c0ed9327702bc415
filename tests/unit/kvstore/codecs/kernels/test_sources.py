from __future__ import annotations

import pytest

pytest.importorskip("numba")

from kvstore.codecs.loops import numba_functions
from kvstore.codecs.loops.numba_functions import ROOT, sources_of


@pytest.fixture
def tree(tmp_path):
    """A package: a file of kernels, what it imports, and what it has nothing to do with."""
    package = tmp_path / "kvstore" / "rows"
    package.mkdir(parents=True)
    (package / "pack.py").write_text(
        "from kvstore.rows import levels\nif TYPE_CHECKING:\n    from kvstore.shapes import Shape\n"
    )
    (package / "levels.py").write_text("def one():\n    from kvstore.floats import WIDTH\n")
    (package.parent / "floats.py").write_text("WIDTH = 2\n")
    (package.parent / "shapes.py").write_text("Shape = int\n")
    (package.parent / "other.py").write_text("import kvstore.rows.pack\n")
    return package.parent


def digest(tree):
    numba_functions._imports.cache_clear()
    return sources_of(tree / "rows" / "pack.py", tree.parent)


USED, UNUSED = ["rows/pack.py", "rows/levels.py", "floats.py"], ["shapes.py", "other.py"]


@pytest.mark.parametrize("name", USED + UNUSED)
def test_a_change_in_a_file_that_it_uses_is_another_digest_and_no_other_is(tree, name):
    before = digest(tree)
    path = tree / name
    path.write_text(path.read_text() + "# changed\n")
    assert (digest(tree) != before) is (name in USED)


def test_code_for_another_processor_has_another_key(tree, monkeypatch):
    """Kernels are emitted for the vectors of the named processor, which numba's key lacks."""
    before = digest(tree)
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert digest(tree) != before


def test_what_counts_compilations_compiles_nothing_anew():
    loops = ROOT / "kvstore" / "codecs" / "loops"
    known = numba_functions._imports(loops / "numba_functions.py", ROOT)
    assert loops / "compiled.py" not in known


def test_functions_that_carry_no_digest_call_nothing_of_other_files():
    """numba looks at a function's own file only."""
    codecs = ROOT / "kvstore" / "codecs"
    files = [x for x in codecs.rglob("*.py") if "compiled(" in x.read_text()]
    bare = [x for x in files if "sources_of(" not in x.read_text()]
    assert {x.name for x in bare} >= {"compiled_loops.py"}
    for file in bare:
        for line in file.read_text().splitlines():
            if line.startswith("from kvstore.codecs.loops.numba_functions import"):
                assert line.split("import ")[1] == "compiled", file
