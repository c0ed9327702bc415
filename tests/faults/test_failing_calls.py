"""The k-th call of the system fails, or is the last one, for every k: under ``strace``."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.disk_tier import DiskTier
from tests.faults.disk_files import nothing_left
from tests.faults.failing_calls import (
    BLOBS,
    BUDGET,
    CALLS,
    FIRST,
    GONE,
    LATE,
    NEW,
    NO_TIER,
    OLD,
    RECORD,
    THEN,
    Life,
    check,
    live,
)

AT_LEAST = 40  # calls of one life that meet its folder; there are some fifty
EVERY = 8  # of them one in so many, without --thorough


def strace_works() -> bool:
    """Whether it is installed, knows the options, and may trace."""
    probe = [
        "strace",
        "-qq",
        "-o",
        "/dev/null",
        "--trace-path=/",
        "--inject=close:error=EIO",
        "true",
    ]
    return shutil.which("strace") is not None and subprocess.run(probe).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not strace_works(), reason="no strace that may trace"),
]


@pytest.fixture
def every(pytestconfig: pytest.Config) -> int:
    return 1 if pytestconfig.getoption("--thorough") else EVERY


def lives(tmp_path: Path, fault: str, every: int) -> Iterator[tuple[str, Path, Life]]:
    """One life for each call, until there is no k-th one of its kind any more."""
    met = 0
    for call in CALLS:
        for k in range(1, 100, every):
            folder = tmp_path / f"{call}-{k}" / "cold"
            folder.parent.mkdir()
            life = live(folder, call, fault, k)
            if not life.injected:
                assert life.returncode == 0 and "closed" in life.steps, life
                break
            met += 1
            yield f"{call} {k}", folder, life
            shutil.rmtree(folder.parent)
    assert met >= AT_LEAST // every


def next_life(folder: Path) -> dict[bytes, bytes]:
    """Open the folder without faults, see that it takes more; returns its blobs."""
    tier = DiskTier(folder, BUDGET)
    there = check(tier)
    assert tier.put_many([(b"more", b"blob")]) == 1
    assert tier.get_many([b"more"]) == [b"blob"]
    tier.close()
    assert nothing_left(folder)
    return there


@pytest.mark.parametrize("error", ["EIO", pytest.param("ENOSPC", marks=pytest.mark.thorough)])
def test_each_call_of_the_system_fails_once(tmp_path: Path, every: int, error: str) -> None:
    """The tier refuses, or is refused with a sentence; no blob is ever another's."""
    for where, folder, life in lives(tmp_path, f"error={error}", every):
        assert life.returncode in (0, NO_TIER), (where, life)
        if life.returncode == NO_TIER:
            assert "disk tier" in life.words and "Traceback" not in life.words
        next_life(folder)


def test_each_call_of_the_system_is_the_last(tmp_path: Path, every: int) -> None:
    """SIGKILL: blobs that were reported kept are there, but for those deleted or replaced since."""
    for where, folder, life in lives(tmp_path, "signal=KILL", every):
        assert life.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), (where, life)
        there = next_life(folder)
        for step, items in (("first", FIRST), ("then", THEN), ("late", LATE)):
            if step in life.steps:
                assert {key for key, _ in items} - {GONE} <= there.keys(), (where, step)
        if "then" in life.steps and "new" not in life.steps:
            assert GONE in there
        if "gone" in life.steps:
            assert GONE not in there
        if "new" in life.steps:
            assert there[RECORD] == NEW
        elif "old" in life.steps:
            assert there[RECORD] in (OLD, NEW)
        assert there.keys() <= {*BLOBS, RECORD}
