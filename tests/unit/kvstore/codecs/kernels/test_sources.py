from __future__ import annotations

import pytest

pytest.importorskip("numba")

from kvstore.codecs.loops.numba_functions import ROOT, SOURCES, digest_of


@pytest.fixture
def root(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "pack.py").write_text("a = 1\n")
    (tmp_path / "floats.py").write_text("b = 2\n")
    return tmp_path


def test_the_same_files_give_the_same_digest(root):
    before = digest_of(root)
    (root / "notes.md").write_text("no source")
    assert digest_of(root) == before < 1 << 48


def test_a_change_in_any_folder_is_another_digest(root):
    before = digest_of(root)
    (root / "rows" / "pack.py").write_text("a = 2\n")
    assert digest_of(root) != before


def test_a_new_file_is_another_digest(root):
    before = digest_of(root)
    (root / "rows" / "empty.py").write_text("")
    assert digest_of(root) != before


def test_a_moved_file_is_another_digest(root):
    before = digest_of(root)
    (root / "rows" / "pack.py").rename(root / "pack.py")
    assert digest_of(root) != before


def test_all_codecs_are_among_the_sources():
    assert ROOT.parts[-2:] == ("kvstore", "codecs")
    assert digest_of(ROOT) == SOURCES
