"""The disk tier against kills, full disks and damaged files; only power cuts are simulated."""

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
from kvstore.tiers.disk.budget import file_bytes_limit
from kvstore.tiers.disk.disk_tier import DiskTier
from kvstore.tiers.disk.folder import KEEP_DAMAGED_S
from tests.faults.disk_writer import BATCH, batch_keys, content, record

MB = 1 << 20
RECORD = b"r" + b"0" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cold"


def fill(folder: Path, count: int = 12, length: int = 150_000) -> dict[bytes, bytes]:
    """Open, write, close cleanly."""
    blobs = {b"c%032d" % i: random.Random(i).randbytes(length) for i in range(count)}
    tier = DiskTier(folder, 64 * MB)
    assert tier.put_many(list(blobs.items())) == count
    tier.close()
    return blobs


def nothing_left(folder: Path) -> bool:
    """Of damaged files one is put aside at most, and is nobody else's to read."""
    aside = folder / "data.damaged"
    assert not aside.exists() or aside.stat().st_mode & 0o777 == 0o600
    usual = {"data.mdb", "lock.mdb", "owner.lock", "closed", "data.damaged"}
    return {x.name for x in folder.iterdir()} <= usual


def check_usable(folder: Path, blobs: dict[bytes, bytes]) -> int:
    """The tier opens, gives back right blobs or none, and takes new ones; how many old ones."""
    tier = DiskTier(folder, 64 * MB)
    found = dict(zip(blobs, tier.get_many(list(blobs)), strict=True))
    assert all(blob in (None, blobs[key]) for key, blob in found.items())
    assert tier.put_many([(b"new", b"blob")]) == 1
    assert tier.get_many([b"new"]) == [b"blob"]
    tier.delete_many([b"new"])
    tier.close()
    return sum(blob is not None for blob in found.values())


# Kills


def test_a_writer_killed_at_any_moment_leaves_whole_blobs(folder: Path) -> None:
    """Every call that returned is there; of one in flight the first blobs are, or none."""
    budget = 24 * MB  # so that evicting and reusing pages go on as well
    moments = random.Random(8)
    for seed in range(6):
        done = kill_a_writer(folder, budget, seed, after_s=moments.uniform(0.05, 0.5))
        started = time.monotonic()
        tier = DiskTier(folder, budget)
        assert time.monotonic() - started < 5.0
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
    command = [
        sys.executable,
        "-m",
        "tests.faults.disk_writer",
        str(folder),
        str(budget),
        str(seed),
    ]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as writer:
        assert writer.stdout is not None
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
from kvstore.tiers.disk.disk_tier import DiskTier
from kvstore.tiers.disk.folder import KEEP_DAMAGED_S
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
assert tier.delete_many([blobs[0][0]]) == 1
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


def run_in_background(code: str, *arguments: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit {done.returncode}:\n{done.stderr[-2000:]}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount a small file system here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


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


# Damaged files


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


FLIPS = """
import pathlib, random, shutil, sys
from kvstore.tiers.disk.disk_tier import DiskTier
from kvstore.tiers.disk.folder import KEEP_DAMAGED_S
source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
whole = (source / "data.mdb").read_bytes()
tree = [i for i in range(0, len(whole), 4096) if whole[i + 10] & 0x0B]  # branch, leaf, meta
for seed in range(150):
    chance = random.Random(seed)
    data = bytearray(whole)
    for _ in range(chance.choice((1, 1, 4, 64))):
        page = chance.choice(tree) if seed % 2 else chance.randrange(0, len(data), 4096)
        data[page + chance.randrange(4096)] ^= 1 << chance.randrange(8)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (target / "data.mdb").write_bytes(data)
    tier = DiskTier(target, 64 << 20)
    tier.get_many([b"c%032d" % i for i in range(12)])
    tier.put_many([(b"n%d" % i, bytes(100_000)) for i in range(8)])
    tier.delete_many([b"c%032d" % i for i in range(12)])
    assert tier.get_many([b"n1"]) == [bytes(100_000)]
    tier.close()
"""


def test_flipped_bits_never_end_the_process(folder: Path, tmp_path: Path) -> None:
    fill(folder, length=70_000)
    run_in_background(FLIPS, str(folder), str(tmp_path / "flipped"))


def flip_in_file(folder: Path, name: bytes, offset: int) -> None:
    """Flip a bit ``offset`` bytes behind the start of every occurrence of ``name``."""
    content = (folder / "data.mdb").read_bytes()
    place = content.find(name)
    assert place > 0
    with (folder / "data.mdb").open("r+b") as file:
        while place >= 0:
            file.seek(place + offset)
            file.write(bytes([content[place + offset] ^ 1]))
            place = content.find(name, place + 1)


# Bits that rot leave the time unchanged: the file looks as it was closed, and nobody verifies it.
ROT = """
import contextlib, pathlib, random, shutil, sys
from kvstore.errors import TierUnavailable
from kvstore.tiers.disk.disk_tier import DiskTier
from kvstore.tiers.disk.folder import KEEP_DAMAGED_S
source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
whole = (source / "data.mdb").read_bytes()
tree = [i for i in range(0, len(whole), 4096) if whole[i + 10] & 0x0B]  # branch, leaf, meta
keys = [b"c%032d" % i for i in range(12)]
for seed in range(120):
    chance = random.Random(seed)
    data = bytearray(whole)
    for _ in range(chance.choice((1, 1, 4, 64))):
        place = chance.choice((chance.randrange(32), chance.randrange(4096)))
        data[chance.choice(tree) + place] ^= 1 << chance.randrange(8)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (target / "data.mdb").write_bytes(data)
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
    run_in_background(ROT, str(folder), str(tmp_path / "rotten"))


def test_a_damaged_index_entry_is_noticed_at_the_start(folder: Path) -> None:
    blobs = fill(folder)
    flip_in_file(folder, b"c%032d" % 5, offset=33 + 8)  # its length
    assert check_usable(folder, blobs) == 0
    assert nothing_left(folder)


def test_damage_under_an_open_tier_costs_its_blobs_and_not_the_tier(folder: Path) -> None:
    blobs = fill(folder)
    tier = DiskTier(folder, 64 * MB)
    pinned = b"c%032d" % 7
    tier.pin([pinned])
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


def test_who_is_forgotten_in_a_damaged_file_is_gone_with_it(folder: Path) -> None:
    blobs = fill(folder)
    tier = DiskTier(folder, 64 * MB)
    flip_in_file(folder, b"c%032d\0\0" % 5, offset=30)
    with pytest.raises(TierUnavailable):
        tier.get_many(list(blobs))
    tier.delete_many(list(blobs)[:1])
    assert (folder / "data.damaged").exists()
    tier.drop_quarantine()
    assert not (folder / "data.damaged").exists()
    tier.drop_quarantine()
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


def test_a_damaged_file_is_kept_aside_for_a_week(folder: Path) -> None:
    blobs = fill(folder)
    flip_in_file(folder, b"c%032d" % 5, offset=33 + 8)
    rotten = (folder / "data.mdb").read_bytes()
    assert check_usable(folder, blobs) == 0
    aside = folder / "data.damaged"
    assert aside.read_bytes() == rotten
    check_usable(folder, blobs)
    assert aside.exists()
    old = aside.stat().st_mtime - KEEP_DAMAGED_S - 60
    os.utime(aside, (old, old))
    check_usable(folder, blobs)
    assert not aside.exists()
