"""Deletions that a tier owes, as the next life of the engine reads them."""

from __future__ import annotations

import stat
from pathlib import Path

from kvstore.tiers.owed_deletions import MAX_OWED, OwedDeletions

ONE, TWO, THREE = [b"r" + bytes(32), b"\xff\x00"], [b"c\n"], [b"t"]


def test_the_next_life_finds_them_in_order(tmp_path: Path):
    path = tmp_path / "owed"
    owed = OwedDeletions(path)
    assert not path.exists()
    owed.add(ONE)
    owed.add(TWO)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = OwedDeletions(path)
    assert again.take() == [ONE, TWO]
    assert len(again) == 0
    assert OwedDeletions(path).take() == [ONE, TWO]  # until it is settled
    again.add(THREE)
    again.settle()
    assert OwedDeletions(path).take() == [THREE]


def test_what_cannot_be_read_is_ignored(tmp_path: Path):
    path = tmp_path / "owed"
    owed = OwedDeletions(path)
    owed.add(ONE)
    whole = path.read_bytes()
    path.write_bytes(b'["no hex"]\n[7]\n\xff\n' + whole + whole[: len(whole) // 2])
    assert OwedDeletions(path).take() == [ONE]


def test_the_oldest_are_dropped_where_there_are_too_many(tmp_path: Path):
    path = tmp_path / "owed"
    owed = OwedDeletions(path)
    for number in range(MAX_OWED + 2):
        owed.add([b"%d" % number])
    for found in (owed, OwedDeletions(path)):
        taken = found.take()
        assert (len(taken), taken[0], taken[-1]) == (MAX_OWED, [b"2"], [b"%d" % (MAX_OWED + 1)])


def test_a_file_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog):
    for path in (tmp_path / "absent" / "owed", None):
        owed = OwedDeletions(path)
        owed.add(ONE)
        owed.add(TWO)
        assert owed.take() == [ONE, TWO]
        owed.settle()
    assert len(caplog.records) == 1
