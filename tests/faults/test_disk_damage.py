"""The disk tier against damaged files: at the start, and under a tier that is open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore.tiers.disk_tier import DiskTier
from tests.faults.disk_files import (
    MB,
    check_usable,
    fill,
    flip_in_file,
    nothing_left,
    run_in_background,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.mark.parametrize(
    "keep", [0, 1, 100, 4096, 8191, 8192, 8193, 40_000, 800_000, 0.5, 0.9, 0.99999]
)
def test_a_truncated_file_is_deleted(folder: Path, keep: float) -> None:
    blobs = fill(folder)
    data = folder / "data.mdb"
    size = data.stat().st_size
    os.truncate(data, int(keep if keep >= 1 else size * keep))
    assert check_usable(folder, blobs) in (0, len(blobs))
    assert nothing_left(folder)
    assert check_usable(folder, blobs) == 0  # and it stays usable


@pytest.mark.parametrize("garbage", [b"", b"x", b"garbage" * 5000, bytes(1 << 20)])
def test_garbage_is_deleted(folder: Path, garbage: bytes) -> None:
    for _ in range(3):
        fill(folder, count=1)
        (folder / "data.mdb").write_bytes(garbage)
        assert check_usable(folder, {}) == 0
    assert nothing_left(folder)


def test_garbage_that_looks_cleanly_closed_is_deleted(folder: Path) -> None:
    fill(folder)
    data = folder / "data.mdb"
    before = data.stat()
    data.write_bytes(os.urandom(before.st_size))
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert check_usable(folder, {}) == 0
    assert nothing_left(folder)


def test_a_damaged_reader_table_or_mark_does_not_matter(folder: Path) -> None:
    blobs = fill(folder)
    for name in ("lock.mdb", "closed", "owner.lock"):
        (folder / name).write_bytes(os.urandom(10_000))
        assert check_usable(folder, blobs) == len(blobs)


FLIPPED = """
import contextlib, pathlib, random, shutil, sys
from kvstore.errors import TierUnavailable
from kvstore.tiers.disk_tier import DiskTier
source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
whole = (source / "data.mdb").read_bytes()
tree = [i for i in range(0, len(whole), 4096) if whole[i + 10] & 0x0B]  # branch, leaf, meta
keys = [b"c%032d" % i for i in range(12)]

def files(number, place):
    for seed in range(number):
        chance = random.Random(seed)
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 4, 64))):
            data[place(seed, chance)] ^= 1 << chance.randrange(8)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (target / "data.mdb").write_bytes(data)
        yield seed
"""
FLIPS = """
def place(seed, chance):
    page = chance.choice(tree) if seed % 2 else chance.randrange(0, len(whole), 4096)
    return page + chance.randrange(4096)

for _ in files(150, place):
    tier = DiskTier(target, 64 << 20)
    tier.get_many(keys)
    tier.put_many([(b"n%d" % i, bytes(100_000)) for i in range(8)])
    tier.delete_many(keys)
    assert tier.get_many([b"n1"]) == [bytes(100_000)]
    tier.close()
"""


def test_flipped_bits_never_end_the_process(folder: Path, tmp_path: Path) -> None:
    fill(folder, length=70_000)
    run_in_background(FLIPPED + FLIPS, str(folder), str(tmp_path / "flipped"))


# Bits that rot leave the time unchanged: the file looks as it was closed, and is not verified.
ROT = """
def place(seed, chance):
    return chance.choice(tree) + chance.choice((chance.randrange(32), chance.randrange(4096)))

for seed in files(120, place):
    stat = (target / "data.mdb").stat()
    (target / "closed").write_bytes(b"%d %d" % (stat.st_size, stat.st_mtime_ns))
    tier = DiskTier(target, 64 << 20)
    for use in (tier.get_many, tier.delete_many):
        with contextlib.suppress(TierUnavailable):
            use(keys)
    for _ in range(2):  # the first write may be what finds the damage
        with contextlib.suppress(TierUnavailable):
            tier.put_many([(b"n1", bytes(100_000))])
    assert tier.get_many([b"n1"]) == [bytes(100_000)] and tier.stats().available, seed
    tier.close()
"""


def test_rot_costs_the_blobs_and_not_the_tier(folder: Path, tmp_path: Path) -> None:
    fill(folder, length=70_000)
    run_in_background(FLIPPED + ROT, str(folder), str(tmp_path / "rotten"))


def test_a_damaged_index_entry_is_noticed_at_the_start(folder: Path) -> None:
    blobs = fill(folder)
    flip_in_file(folder, b"c%032d" % 5, offset=33 + 8)  # its length
    assert check_usable(folder, blobs) == 0
    assert nothing_left(folder)


def test_damage_under_an_open_tier_costs_its_blobs_and_not_the_tier(folder: Path) -> None:
    blobs = fill(folder)
    tier = DiskTier(folder, 64 * MB)
    pinned = b"c%032d" % 7
    tier.pin(pinned, True)
    flip_in_file(folder, b"c%032d\0\0" % 5, offset=30)  # the name of a fragment
    with pytest.raises(TierUnavailable):
        tier.get_many(list(blobs))
    assert not tier.stats().available
    with pytest.raises(TierUnavailable, match="damaged"):
        tier.get_many([pinned])
    assert tier.put_many([(b"new", b"blob")]) == 1
    assert tier.stats().available
    assert tier.get_many([b"new", pinned]) == [b"blob", None]
    assert not any(tier.contains_many(list(blobs)))
    tier.close()
    assert check_usable(folder, blobs) == 0
    assert nothing_left(folder)


UNREADABLE = """
import os, pathlib, sys
from kvstore.tiers.disk_tier import DiskTier
folder = pathlib.Path(sys.argv[1])
tier = DiskTier(folder, 64 << 20)
os.truncate(folder / "data.mdb", int(sys.argv[2]))
print(tier.get_many([b"c%032d" % i for i in range(12)]).count(None))
"""


@pytest.mark.parametrize("page", [2, 3, 40, 200])
def test_what_cannot_be_read_under_the_map_ends_the_process_once(folder: Path, page: int) -> None:
    """SIGBUS, as of a medium error: the next life opens the folder and is right."""
    blobs = fill(folder)
    command = [sys.executable, "-c", UNREADABLE, str(folder), str(4096 * page)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGBUS, done
    assert check_usable(folder, blobs) in (0, len(blobs))
    assert nothing_left(folder)
    assert check_usable(folder, {}) == 0


def test_who_is_forgotten_in_a_damaged_file_is_gone_with_it(folder: Path) -> None:
    blobs = fill(folder)
    tier = DiskTier(folder, 64 * MB)
    flip_in_file(folder, b"c%032d\0\0" % 5, offset=30)
    with pytest.raises(TierUnavailable):
        tier.get_many(list(blobs))
    tier.delete_many(list(blobs)[:1])
    assert nothing_left(folder)
    assert not any(blob[:64] in (folder / "data.mdb").read_bytes() for blob in blobs.values())
    tier.close()


class SlowToEnter:
    """The lock of writers, which one thread reaches late: after ``taken`` by another, if ever."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.arrived = threading.Event()
        self.taken = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread().name == "late":
            self.arrived.set()
            self.taken.wait(1.0)
            self.lock.acquire()
        else:
            self.lock.acquire()
            self.taken.set()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_a_damaged_file_is_replaced_beside_a_call_that_has_yet_to_write(folder: Path) -> None:
    blobs = fill(folder)
    tier = DiskTier(folder, 64 * MB)
    writing = SlowToEnter()
    tier._writing = writing  # type: ignore[assignment]
    late = threading.Thread(target=lambda: tier.flush(), name="late", daemon=True)
    late.start()
    assert writing.arrived.wait(20)
    flip_in_file(folder, b"c%032d\0\0" % 5, offset=30)
    with pytest.raises(TierUnavailable):
        tier.get_many(list(blobs))
    writer = threading.Thread(target=tier.put_many, args=([(b"new", b"blob")],), daemon=True)
    writer.start()
    writer.join(20)
    late.join(20)
    assert not writer.is_alive()
    assert not late.is_alive()
    assert tier.get_many([b"new"]) == [b"blob"]
    tier.close()
