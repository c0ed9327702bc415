"""The disk tier against kills and full disks; only power cuts are simulated."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore.tiers.disk_budget import file_bytes_limit
from kvstore.tiers.disk_tier import DiskTier
from tests.faults.disk_files import (
    MB,
    check_usable,
    fill,
    nothing_left,
    run_in_background,
)
from tests.faults.disk_writer import BATCH, batch_keys, content, record
from tests.stored_objects import mounted

RECORD = b"r" + b"0" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cold"


def test_a_writer_killed_at_any_moment_leaves_whole_blobs(folder: Path) -> None:
    """Every call that returned is there; of one in flight the first blobs are, or none."""
    budget = 24 * MB  # so that evicting and reusing pages go on as well
    moments = random.Random(8)
    for seed in range(6):
        done = kill_a_writer(folder, budget, seed, after_s=moments.uniform(0.05, 0.5))
        started = time.monotonic()
        tier = DiskTier(folder, budget)
        assert time.monotonic() - started < 20.0
        for call in (done, done + 1):
            keys = batch_keys(call)
            found = tier.get_many(keys)
            kept = BATCH - found.count(None)
            assert found == [content(key) for key in keys[:kept]] + [None] * (BATCH - kept), call
        assert tier.contains_many(batch_keys(done)) == [True] * BATCH
        (newest,) = tier.get_many([RECORD])
        assert newest in (record(done), record(done + 1))
        assert tier.stats().nbytes <= budget
        tier.close()
    assert (folder / "data.mdb").stat().st_size <= file_bytes_limit(budget)
    assert nothing_left(folder)


def kill_a_writer(folder: Path, budget: int, seed: int, after_s: float) -> int:
    """The last call of which the writer said that it was done."""
    arguments = (str(folder), str(budget), str(seed))
    command = [sys.executable, "-m", "tests.faults.disk_writer", *arguments]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as writer:
        lines = [writer.stdout.readline()]  # it is up and writing
        time.sleep(after_s)
        writer.kill()
        lines += writer.stdout.readlines()
    whole = [line for line in lines if line.endswith(b"\n")]
    assert whole, "the writer did not start"
    return int(whole[-1])


def test_a_power_cut_loses_the_last_commit_at_most(folder: Path, tmp_path: Path) -> None:
    """LMDB syncs a commit's root page with the *next* commit, so a cut may lose that page."""
    tier = DiskTier(folder, 64 * MB)
    cut = tmp_path / "cut"
    for call in range(6):
        roots = (folder / "data.mdb").read_bytes()[: 2 * 4096]
        keys = batch_keys(call)
        tier.put_many([(key, content(key)) for key in keys])
        shutil.rmtree(cut, ignore_errors=True)
        cut.mkdir()
        (cut / "data.mdb").write_bytes(roots + (folder / "data.mdb").read_bytes()[2 * 4096 :])
        after = DiskTier(cut, 64 * MB)
        assert after.contains_many(keys) == [False] * BATCH
        for before in range(call):
            keys = batch_keys(before)
            assert after.get_many(keys) == [content(key) for key in keys]
        after.close()
        assert nothing_left(cut)
    tier.close()


def test_closing_waits_for_those_inside(folder: Path) -> None:
    blobs = fill(folder, count=30)
    tier = DiskTier(folder, 64 * MB)
    wrong: list[object] = []

    def read() -> None:
        try:
            while True:
                if tier.get_many(list(blobs)) != list(blobs.values()):
                    wrong.append("content")
        except TierUnavailable:
            pass

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    time.sleep(0.1)
    tier.close()
    for reader in readers:
        reader.join(10)
    assert not any(reader.is_alive() for reader in readers)
    assert wrong == []


# No room

FULL_DISK = """
import pathlib, resource, sys
from kvstore.tiers.disk_tier import DiskTier
tier = DiskTier(pathlib.Path(sys.argv[1]), 64 << 20)
blobs = [(b"c%032d" % i, bytes([i]) * 200_000) for i in range(60)]
assert tier.put_many(blobs[:4]) == 4
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
kept = sum(tier.put_many([item]) for item in blobs[4:])
assert kept < 56, kept
names = [key for key, _ in blobs]
refused = [key for key, held in zip(names, tier.contains_many(names)) if not held]
assert len(refused) == 56 - kept
assert not tier.replace(refused[0], bytes(3_000_000))
assert tier.stats().errors == 57 - kept and tier.stats().available
assert tier.get_many(names[:4]) == [b for _, b in blobs[:4]]
assert tier.delete_many([blobs[3][0]]) == 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert tier.put_many(blobs) == 60
assert tier.get_many(names) == [b for _, b in blobs]
tier.close()
"""


@pytest.mark.parametrize("limit", [1_000_000, 1_500_001, 4_000_000])
def test_a_file_that_may_not_grow_refuses_blobs_and_serves_on(folder: Path, limit: int) -> None:
    run_in_background(FULL_DISK, str(folder), str(limit))
    assert nothing_left(folder)
    tier = DiskTier(folder, 64 * MB)
    assert tier.stats().num_blobs == 60
    tier.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    with mounted(tmp_path / "small", "size=16m") as place:
        yield place


def test_a_full_disk_refuses_blobs_and_serves_on(small_disk: Path) -> None:
    tier = DiskTier(small_disk / "cold", 64 * MB)
    blobs = [(b"c%032d" % i, bytes([i]) * 1_000_000) for i in range(30)]
    kept = sum(tier.put_many([item]) for item in blobs)
    assert 8 <= kept <= 16
    assert tier.stats().errors == 30 - kept
    for key, blob in blobs:
        assert tier.get_many([key])[0] in (None, blob)
    assert tier.delete_many([key for key, _ in blobs]) == kept
    tier.flush()
    for first in range(0, 30, 5):  # pages come free two commits later
        tier.put_many([(b"small", b"%d" % first)])
        tier.delete_many([b"small"])
    assert tier.put_many(blobs[:6]) == 6
    tier.close()


def test_a_full_inode_table(tmp_path: Path) -> None:
    """An open tier needs no further file; one that is to be opened is refused with a sentence."""
    with mounted(tmp_path / "few", "size=16m,nr_inodes=12") as place:
        tier = DiskTier(place / "cold", 64 * MB)
        used_up = use_up_inodes(place)
        with pytest.raises(TierUnavailable, match="cannot use .*other: No space"):
            DiskTier(place / "other", 64 * MB)
        blobs = [(b"c%032d" % i, bytes([i]) * 100_000) for i in range(20)]
        assert tier.put_many(blobs) == 20
        assert tier.replace(RECORD, b"new")
        assert tier.delete_many([blobs[19][0]]) == 1
        tier.close()  # the mark that it was closed is a file, too
        with pytest.raises(TierUnavailable):
            DiskTier(place / "other", 64 * MB)
        for file in used_up:
            file.unlink()
        tier = DiskTier(place / "cold", 64 * MB)
        assert tier.get_many([x for x, _ in blobs]) == [*(x for _, x in blobs[:19]), None]
        tier.close()


def use_up_inodes(place: Path) -> list[Path]:
    made: list[Path] = []
    while True:
        try:
            (place / str(len(made))).touch()
        except OSError:
            return made
        made.append(place / str(len(made)))


def test_a_read_only_file_system_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=16m") as place:
        blobs = fill(place / "cold", 4)
        remount = ["mount", "-o", "remount,ro", str(place)]
        subprocess.run(remount, check=True)
        with pytest.raises(TierUnavailable, match="cannot .*[Rr]ead-only"):
            DiskTier(place / "cold", 64 * MB)
        subprocess.run([*remount[:2], "remount,rw", str(place)], check=True)
        tier = DiskTier(place / "cold", 64 * MB)
        assert tier.get_many(list(blobs)) == list(blobs.values())
        tier.close()


REFUSED = """
import os, pathlib, resource, sys
from kvstore.errors import TierUnavailable
from kvstore.tiers.disk_tier import DiskTier
folder, fault = pathlib.Path(sys.argv[1]), sys.argv[2]
if fault == "descriptors":
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + int(sys.argv[3]), free + 100))
else:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    DiskTier(folder, 64 << 20)
except TierUnavailable as error:
    assert "disk tier" in str(error) and str(folder) in str(error), error
    assert ("open files" in str(error)) == (fault == "descriptors"), error
else:
    raise AssertionError("it was opened")
"""


@pytest.mark.parametrize("number", range(4))
def test_too_few_descriptors_are_said(folder: Path, number: int) -> None:
    blobs = fill(folder, 4)
    run_in_background(REFUSED, str(folder), "descriptors", str(number))
    assert check_usable(folder, blobs) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_may_not_be_entered_any_more_is_said(folder: Path) -> None:
    blobs = fill(folder, 4)
    run_in_background(REFUSED, str(folder), "permission")
    assert check_usable(folder, blobs) == 4
