from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from kvstore.blobs.chain import FORMAT_VERSION
from kvstore.errors import TierUnavailable
from kvstore.tiers.disk_budget import capacity_within, file_bytes_limit
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.lmdb_blobs import DATABASES, FRAGMENT_BYTES
from tests.clock import Clock

MB = 1 << 20
FILE_SYSTEM_BYTES = 64 << 10  # that it counts with a file, for its own lists of blocks
Open = Callable[..., DiskTier]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    tiers: list[DiskTier] = []

    def open_tier(capacity_bytes: int = 64 * MB, *clocks: Clock) -> DiskTier:
        for tier in tiers:
            tier.close()
        tiers.append(DiskTier(tmp_path / "cold", capacity_bytes, *clocks))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


def text(i: int, length: int) -> bytes:
    """Recognisable content, as plain as token ids would be."""
    line = b"%06d is a secret / " % i
    return (line * (length // len(line) + 1))[:length]


def keys(*numbers: int) -> list[bytes]:
    return [b"c%032d" % i for i in numbers]


def put(tier: DiskTier, numbers: range, length: int = 1000) -> None:
    assert tier.put_many([(keys(i)[0], text(i, length)) for i in numbers]) == len(numbers)


def test_blobs_survive_a_restart(opened: Open):
    put(opened(), range(5), 300_000)
    tier = opened()
    assert tier.get_many(keys(0, 4, 5)) == [text(0, 300_000), text(4, 300_000), None]
    assert tier.stats().num_blobs == 5


def test_a_chain_loses_its_end_first_after_a_restart_too(opened: Open):
    put(opened(), range(100))
    tier = opened()
    tier = opened(tier.stats().nbytes // 2)
    flags = tier.contains_many(keys(*range(100)))
    assert flags == sorted(flags, reverse=True)
    assert 45 < sum(flags) <= 50
    put(tier, range(1000, 1020))
    flags = tier.contains_many(keys(*range(100)))
    assert flags == sorted(flags, reverse=True)


def test_what_the_full_disk_let_nothing_delete_can_be_forgotten(opened: Open):
    import lmdb

    tier = opened()
    put(tier, range(20))
    tier = opened(tier.stats().nbytes)
    commit = tier._commit

    def full(gone: Iterable[bytes], new: Mapping[bytes, memoryview]) -> None:
        raise lmdb.MapFullError("no room")

    tier._commit = full  # type: ignore[method-assign]
    with pytest.raises(TierUnavailable):
        tier.put_many([(keys(50)[0], text(50, 1000))])
    tier._commit = commit  # type: ignore[method-assign]
    held = tier.contains_many(keys(*range(20), 50))
    assert held.count(False) >= 2 and not held[-1]
    (gone, *_) = [i for i in range(20) if not held[i]]
    assert tier.get_many(keys(gone)) != [None]
    tier.delete_many(keys(gone))
    assert tier.get_many(keys(gone)) == [None]


def test_everything_is_private(opened: Open, tmp_path: Path):
    put(opened(), range(3))
    opened().close()
    folder = tmp_path / "cold"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {x.stat().st_mode & 0o777 for x in folder.iterdir()} == {0o600}


def test_a_second_process_is_refused_with_the_first_ones_pid(opened: Open, tmp_path: Path):
    opened()
    code = (
        "import sys, pathlib\n"
        "from kvstore.tiers.disk_tier import DiskTier\n"
        "try:\n    DiskTier(pathlib.Path(sys.argv[1]), 1 << 20)\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cold")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("TierInUse")
    assert f"pid {os.getpid()}" in said


@pytest.mark.parametrize("name", ["data.mdb", "owner.lock"])
def test_planted_links_are_refused(tmp_path: Path, name: str):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "cold").mkdir()
    (tmp_path / "cold" / name).symlink_to(victim)
    with pytest.raises(TierUnavailable):
        DiskTier(tmp_path / "cold", MB)
    assert victim.read_text() == "precious"


def test_a_folder_that_is_a_file_is_refused_with_advice(tmp_path: Path):
    (tmp_path / "cold").write_text("")
    with pytest.raises(TierUnavailable, match="disk_path"):
        DiskTier(tmp_path / "cold", MB)


@pytest.mark.parametrize(
    "length", [1, 1000, 4080, 4081, FRAGMENT_BYTES - 16, FRAGMENT_BYTES, 1_000_000]
)
def test_accounting_covers_the_pages_used(opened: Open, tmp_path: Path, length: int):
    tier = opened()
    count = 20_000_000 // (length + 8000)
    for i in range(0, count, 200):
        put(tier, range(i, min(i + 200, count)), length)
    used = (tmp_path / "cold" / "data.mdb").stat().st_size
    assert used <= 1.02 * tier.stats().nbytes + 300_000
    assert tier.stats().nbytes <= 1.05 * used + 300_000


def test_the_file_stays_inside_its_limit_under_steady_eviction(opened: Open, tmp_path: Path):
    budget = 48 * MB
    tier = opened(budget)
    source = random.Random(5)
    content = memoryview(source.randbytes(3 * MB))
    written = 0
    while written < 8 * budget:
        sizes = [source.choice((3_000, 90_000, 1_200_000, 2_900_000)) for _ in range(8)]
        tier.put_many([(source.randbytes(33), content[:size]) for size in sizes])
        tier.replace(b"r%032d" % source.randrange(20), content[: source.randrange(40_000)])
        written += sum(sizes)
    stats = tier.stats()
    assert stats.errors == 0
    assert 0.85 * budget < stats.nbytes <= budget
    assert (tmp_path / "cold" / "data.mdb").stat().st_size <= file_bytes_limit(budget)


@pytest.mark.parametrize(
    "file_mib", [4, 12, *(pytest.param(x, marks=pytest.mark.thorough) for x in (5, 8, 24))]
)
def test_a_small_file_never_passes_its_limit_and_takes_every_blob(tmp_path: Path, file_mib: int):
    """Blobs that are a good part of the file, and small ones that leave gaps between them."""
    limit = file_mib * MB
    tier = DiskTier(tmp_path / "cold", capacity_within(limit))
    data = tmp_path / "cold" / "data.mdb"
    source = random.Random(file_mib)
    content = source.randbytes(2 * MB)
    sizes = (2_000, 40_000, 130_000, MB, 3 * MB // 2, 2 * MB)
    longest = 0
    for i in range(250):
        key, blob = source.randbytes(33), content[: source.choice(sizes)]
        assert tier.put_many([(key, blob)]) == 1, i
        assert tier.get_many([key]) == [blob], i
        assert tier.replace(b"r%032d" % source.randrange(3), content[: source.randrange(40_000)])
        if i % 7 == 0:
            assert tier.replace(b"tail", content[: source.randrange(MB)])
        if i % 11 == 0:
            tier.delete_many([key])
        else:  # a newcomer may have made way for another
            assert tier.get_many([key])[0] in (blob, None), i
        longest = max(longest, data.stat().st_size, data.stat().st_blocks * 512 - FILE_SYSTEM_BYTES)
    stats = tier.stats()
    tier.close()
    assert longest <= limit
    assert stats.errors == 0
    assert stats.evictions > 20
    again = DiskTier(tmp_path / "cold", capacity_within(limit))
    assert again.stats().num_blobs == stats.num_blobs
    again.close()


def test_a_chain_that_fills_a_small_file_keeps_its_head(tmp_path: Path):
    tier = DiskTier(tmp_path / "cold", capacity_within(12 * MB))
    for chain in range(6):
        names = keys(*range(100 * chain, 100 * chain + 40))
        kept = tier.put_many([(name, bytes(400_000)) for name in names])
        assert 24 <= kept < 40
        assert tier.contains_many(names) == [i < kept for i in range(40)]
    assert tier.stats().errors == 0
    assert (tmp_path / "cold" / "data.mdb").stat().st_size <= 12 * MB
    tier.close()


def test_a_limit_that_holds_hardly_a_blob_is_refused():
    with pytest.raises(
        TierUnavailable, match="disk_bytes is 4194303, .* 4 MiB or more, or 0 to turn"
    ):
        capacity_within(4 * MB - 1)


@pytest.mark.parametrize("limit", [4 * MB, 12 * MB, 60 * MB, 1 << 30, 16 << 30, 1 << 44])
def test_most_of_the_file_is_for_blobs(limit: int):
    capacity = capacity_within(limit)
    assert file_bytes_limit(capacity) <= limit
    assert capacity > (0.7 if limit < 8 * MB else 0.84) * limit


@pytest.mark.parametrize(
    ("before", "budget"),
    [(256 * MB, 10 * MB), (capacity_within(160 * MB), capacity_within(8 * MB))],
)
def test_a_lowered_budget_shrinks_blobs_and_file(
    opened: Open, tmp_path: Path, before: int, budget: int
):
    """Also of a file that is full to its end. One call writes more than one commit holds."""
    put(opened(before), range(140), 1_000_000)
    tier = opened(budget)
    assert tier.stats().nbytes <= budget
    assert tier.contains_many(keys(0, 139)) == [True, False]
    assert tier.get_many(keys(0)) == [text(0, 1_000_000)]
    assert (tmp_path / "cold" / "data.mdb").stat().st_size <= file_bytes_limit(budget)
    put(tier, range(200, 203), 1_000_000)


def test_a_lowered_budget_evicts_what_was_written_longest_ago(opened: Open):
    tier = opened(256 * MB)
    for session in range(9, -1, -1):
        put(tier, range(10 * session, 10 * session + 4), 1_000_000)
        tier.replace(b"r%032d" % session, b"record", after=keys(10 * session + 3)[0])
    tier.replace(b"r%032d" % 9, b"newer record", after=keys(93)[0])
    tier = opened(16 * MB)
    left = [session for session in range(10) if all(tier.contains_many(keys(10 * session)))]
    assert left[:2] == [0, 1] and left[-1] == 9 and len(left) < 6


def test_calls_after_close_are_refused(opened: Open):
    tier = opened()
    tier.close()
    tier.close()
    for call in (lambda: tier.get_many(keys(1)), lambda: tier.delete_many(keys(1)), tier.flush):
        with pytest.raises(TierUnavailable):
            call()


def test_a_file_that_another_release_laid_out_is_swept(opened, tmp_path, caplog):
    import lmdb

    folder = tmp_path / "cold"
    folder.mkdir()
    with lmdb.Environment(str(folder), max_dbs=2) as env:
        for name in (b"index.1", b"pieces.1"):
            database = env.open_db(name)
            with env.begin(write=True) as txn:
                txn.put(b"key", b"an old blob", db=database)
    tier = opened()
    lines = [x.getMessage() for x in caplog.records]
    assert sum(x.endswith("it has the layout of another release") for x in lines) == 1
    assert b"an old blob" not in (folder / "data.mdb").read_bytes()
    put(tier, range(1))


def test_a_format_of_blobs_has_a_layout_of_its_own():
    """Else blobs of the format before would fill the file until they are evicted."""
    assert (FORMAT_VERSION, DATABASES) == (3, (b"index.4", b"pieces.1"))


def test_a_file_of_another_program_is_left_alone(opened: Open, tmp_path: Path):
    import lmdb

    folder = tmp_path / "cold"
    folder.mkdir()
    with lmdb.Environment(str(folder), max_dbs=1) as env, env.begin(write=True) as txn:
        txn.put(b"their key", b"their value")
    with pytest.raises(TierUnavailable, match="another program's.*disk_path"):
        opened()
    assert b"their value" in (folder / "data.mdb").read_bytes()
