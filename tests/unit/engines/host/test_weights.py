"""Digests of large files: of every byte, and read once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from engines.host.weights import CACHE_NAME, SEGMENT_BYTES, SETTLED_S, weight_digests

# By this clock all files are old enough to be remembered.
LATER = 2 * SETTLED_S


def later() -> float:
    return time.time() + LATER


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "model.safetensors"
    made.write_bytes(bytes(SEGMENT_BYTES + 1000))
    return made


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\1")


@pytest.mark.parametrize(
    "at", [0, 3_333_333, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 999]
)
def test_any_byte_changes_the_digest(file: Path, at: int, tmp_path: Path):
    """A change counts even if size and mtime stay the same."""
    before, stat = weight_digests([file], tmp_path, later), file.stat()
    flip(file, at)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = weight_digests([file], tmp_path, later)
    assert after != before
    assert weight_digests([file], None) == after
    with file.open("ab") as stream:  # the length counts, too
        stream.write(b"\0")
    assert weight_digests([file], tmp_path, later) != after


def test_a_file_with_a_known_digest_is_not_read_again(file: Path, tmp_path: Path):
    (digest,) = weight_digests([file], tmp_path, later)
    remembered = tmp_path / CACHE_NAME
    planted = remembered.read_text().replace(digest.hex(), "ab" * 32)
    remembered.write_text(planted)
    assert weight_digests([file], tmp_path, later) == [bytes.fromhex("ab" * 32)]
    assert remembered.read_text() == planted


def test_a_file_that_may_still_be_written_to_is_not_remembered(file: Path, tmp_path: Path):
    weight_digests([file], tmp_path, lambda: file.stat().st_ctime)
    assert not (tmp_path / CACHE_NAME).exists()


def test_other_models_stay_remembered(file: Path, tmp_path: Path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"x")
    for each in (file, other):
        weight_digests([each], tmp_path, later)
    assert set(json.loads((tmp_path / CACHE_NAME).read_text())) == {str(file), str(other)}


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"x": 1}', b"\xff\xfe", b"{"])
def test_a_damaged_memory_or_none_costs_reading_and_nothing_else(file, tmp_path, damage):
    expected = weight_digests([file], tmp_path, later)
    (tmp_path / CACHE_NAME).write_bytes(damage)
    assert weight_digests([file], tmp_path, later) == expected
    assert weight_digests([file], tmp_path / "missing", later) == expected
