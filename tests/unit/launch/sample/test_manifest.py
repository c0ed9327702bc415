from __future__ import annotations

import os

import pytest

from launch.sample.manifest import MANIFEST, SEEN, Damaged, verify, write_manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"weights")
    (tmp_path / "b.json").write_bytes(b"{}")
    write_manifest(tmp_path, "source 1")
    return tmp_path


def test_a_written_manifest_is_accepted_again_and_again(folder):
    verify(folder, "source 1")
    verify(folder, "source 1")


@pytest.mark.parametrize("name", ["a.bin", "b.json"])
def test_a_changed_byte_is_found(folder, name):
    verify(folder, "source 1")
    content = bytearray((folder / name).read_bytes())
    content[0] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(Damaged, match=name):
        verify(folder, "source 1")


def test_a_changed_length_is_found_without_hashing(folder):
    times = (folder / "a.bin").stat()
    (folder / "a.bin").write_bytes(b"weight")
    os.utime(folder / "a.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(Damaged, match="6 bytes instead of 7"):
        verify(folder, "source 1")


def test_a_file_that_was_only_touched_is_hashed_and_accepted(folder):
    verify(folder, "source 1")
    os.utime(folder / "a.bin", ns=(1, 1))
    verify(folder, "source 1")


def test_a_seen_file_is_not_hashed_again(folder):
    verify(folder, "source 1")
    times = (folder / "a.bin").stat()
    (folder / "a.bin").write_bytes(b"WEIGHTS")  # same length
    os.utime(folder / "a.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    verify(folder, "source 1")
    (folder / SEEN).unlink()
    with pytest.raises(Damaged, match="another content"):
        verify(folder, "source 1")


def test_another_source_a_missing_file_and_no_manifest(folder):
    with pytest.raises(Damaged, match="another source"):
        verify(folder, "source 2")
    (folder / "b.json").unlink()
    with pytest.raises(Damaged, match=r"b\.json cannot be read"):
        verify(folder, "source 1")
    (folder / MANIFEST).write_bytes(b"{")
    with pytest.raises(Damaged, match="missing or unreadable"):
        verify(folder, "source 1")
