"""Deletions that a tier owes, as the next life of the engine reads them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvstore.ledger.deletions import MAX_KEYS, Owed, OwedDeletions
from kvstore.ledger.stack import TierStack
from kvstore.stats import Counters
from kvstore.tiers.ram_tier import RamTier

ONE = Owed(1.5, b"r" + bytes(32), [b"r" + bytes(32), b"\xff\x00"])
TWO, THREE = Owed(2.0, b"r2", [b"c\n"]), Owed(3.0, b"r3", [])


def test_the_next_life_finds_what_is_not_done_in_order(tmp_path: Path):
    path = tmp_path / "owed"
    owed = OwedDeletions(path)
    assert not path.exists()
    owed.add(ONE)
    owed.add(TWO)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = OwedDeletions(path)
    assert [*again] == [ONE, TWO]
    again.add(THREE)
    first = next(iter(again))
    again.remove([first])
    assert [*again] == [*OwedDeletions(path)] == [TWO, THREE]


def test_what_cannot_be_read_is_ignored(tmp_path: Path):
    path = tmp_path / "owed"
    owed = OwedDeletions(path)
    owed.add(ONE)
    whole = path.read_bytes()
    path.write_bytes(b'["no hex"]\n[7]\n\xff\n[1,"zz",[]]' + whole + whole[: len(whole) // 2])
    torn = OwedDeletions(path)
    assert [*torn] == [ONE]
    torn.add(TWO)
    assert [*OwedDeletions(path)] == [ONE, TWO]
    path.unlink()
    path.symlink_to(tmp_path / "other")
    (tmp_path / "other").write_bytes(whole)
    assert not OwedDeletions(path)


def test_the_oldest_are_dropped_where_there_are_too_many(tmp_path: Path):
    owed = OwedDeletions(path := tmp_path / "owed")
    third = [b"k"] * (MAX_KEYS // 3)
    for number in range(5):
        owed.add(Owed(float(number), b"r", third))
    assert [x.at_s for x in owed] == [2.0, 3.0, 4.0]
    assert [x.at_s for x in OwedDeletions(path)] == [2.0, 3.0, 4.0]


@pytest.mark.timeout(15)  # seconds for what takes a tenth of one, and minutes if sets are copied
def test_as_many_as_are_kept_are_hidden_and_shown_one_by_one():
    stack = TierStack([RamTier(1 << 20)], Counters())
    keys = [b"c%032d" % i for i in range(MAX_KEYS)]
    stack.tiers[0].put_many([(keys[0], b"blob")])
    for key in keys:
        stack.hide(0, [key])
    assert stack.holds(0, keys[:1]) == [False]
    for key in keys:
        stack.show(0, [key])
    assert stack.holds(0, keys[:1]) == [True]


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path, caplog):
    folder = tmp_path / "absent"
    for path in (folder / "owed", None):
        owed = OwedDeletions(path)
        owed.add(ONE)
        owed.add(TWO)
        assert [*owed] == [ONE, TWO]
    assert len(caplog.records) == 2
    folder.mkdir()
    later = OwedDeletions(folder / "owed")
    later.add(ONE)
    assert [*OwedDeletions(folder / "owed")] == [ONE]
