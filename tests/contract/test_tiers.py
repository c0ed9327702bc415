"""What every tier promises, for all three of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.session import TenantLimits
from tests.contract.tier_rig import KINDS, LOCAL, TierRig, blob_of, key, rig

SMALL, LARGE = 100, 700_000  # within one fragment; several fragments on disk


@pytest.fixture(
    params=[pytest.param(x, marks=[pytest.mark.redis] * x.endswith("redis")) for x in KINDS]
)
def tiers(request: pytest.FixtureRequest) -> Iterator[TierRig]:
    with rig(request.param, request) as made:
        yield made


@pytest.fixture(params=LOCAL)
def local(request: pytest.FixtureRequest) -> Iterator[TierRig]:
    """Tiers with a budget of their own; Redis has its server's alone."""
    with rig(request.param, request) as made:
        yield made


def chain(first: int, last: int, length: int = SMALL) -> list[tuple[bytes, bytes]]:
    return [(key(i), blob_of(i, length)) for i in range(first, last)]


def keys(*numbers: int) -> list[bytes]:
    return [key(i) for i in numbers]


@pytest.mark.parametrize("length", [1, SMALL, 2047, 2048, 4080, 131056, 131057, 262080, LARGE])
def test_gives_back_what_it_got(tiers: TierRig, length: int):
    tier = tiers.open()
    assert tier.put_many(chain(0, 3, length)) == 3
    assert tier.get_many(keys(2, 9, 0)) == [blob_of(2, length), None, blob_of(0, length)]
    assert tier.contains_many(keys(0, 9)) == [True, False]
    assert tier.lengths(keys(0, 9, 2)) == [length, None, length]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_takes_any_buffer_and_keeps_its_own_copy(tiers: TierRig, kind: type):
    tier = tiers.open()
    source = bytearray(blob_of(1, LARGE))
    tier.put_many([(key(1), kind(source))])
    source[:] = bytes(LARGE)
    assert tier.get_many([key(1)]) == [blob_of(1, LARGE)]


def test_an_empty_call_does_nothing(tiers: TierRig):
    tier = tiers.open()
    assert tier.put_many([]) == 0
    assert tier.get_many([]) == []
    assert tier.contains_many([]) == []
    assert tier.delete_many([]) == 0
    tier.touch([])
    tier.flush()


def test_an_existing_blob_is_left_as_it_is(tiers: TierRig):
    tier = tiers.open()
    tier.put_many([(key(1), b"first")])
    before = tier.stats().nbytes
    assert tier.put_many([(key(1), b"second" * 1000)]) == 1
    assert tier.get_many([key(1)]) == [b"first"]
    assert tier.stats().nbytes == before


@pytest.mark.parametrize(("old", "new"), [(SMALL, LARGE), (LARGE, SMALL), (LARGE, LARGE + 1)])
def test_replace_lets_the_newer_value_win(tiers: TierRig, old: int, new: int):
    tier = tiers.open()
    assert tier.replace(key(1), blob_of(1, old))
    assert tier.replace(key(1), blob_of(2, new))
    assert tier.get_many([key(1)]) == [blob_of(2, new)]
    if tiers.has_budget:
        assert tier.stats().nbytes == tiers.cost(new)
        assert tier.stats().num_blobs == 1
        assert tier.stats().evictions == 0


def test_what_cannot_fit_is_refused_and_nothing_else_suffers(local: TierRig):
    tier = local.open(3 * local.cost(SMALL))
    tier.put_many(chain(0, 3))
    assert tier.put_many([(key(7), blob_of(7, LARGE))]) == 0
    assert not tier.replace(key(0), blob_of(7, LARGE))
    assert tier.get_many(keys(0, 1, 2)) == [blob for _, blob in chain(0, 3)]
    assert tier.stats().evictions == 0


def test_nothing_is_kept_beyond_a_hole(local: TierRig):
    tier = local.open()
    tier.put_many(chain(0, 2))
    assert tier.put_many(chain(3, 5), after=key(2)) == 0
    assert tier.put_many(chain(2, 5), after=key(1)) == 3


def test_blobs_of_an_earlier_run_get_their_owner(local: TierRig):
    tier = local.open(8 * local.cost(SMALL))
    tier.put_many(chain(0, 2))
    tier.put_many(chain(2, 4))
    tier.own("flood", keys(0, 1, 77))
    limits = TenantLimits({"flood": 3 * local.cost(SMALL)})
    uses = tier.limit_tenants(limits)
    assert uses is not None and uses["flood"] == 2 * local.cost(SMALL)
    tier.put_many(chain(20, 23), "flood")
    assert tier.contains_many(keys(0, 1, 2, 3)) == [False, False, True, True]


def test_the_budget_holds_for_all_sizes(local: TierRig):
    tier = local.open(4 * local.cost(LARGE))
    for i in range(40):
        tier.put_many([(key(i), blob_of(i, (i * 7919) % LARGE))])
        stats = tier.stats()
        assert 0 < stats.nbytes <= stats.capacity_bytes
    assert stats.evictions > 0
    assert tier.get_many([key(39)]) == [blob_of(39, (39 * 7919) % LARGE)]


def test_deleted_blobs_are_gone_and_can_come_again(tiers: TierRig):
    tier = tiers.open()
    tier.put_many(chain(0, 4, LARGE))
    assert tier.delete_many(keys(2, 3, 3, 9)) == 2
    assert tier.contains_many(keys(0, 1, 2, 3)) == [True, True, False, False]
    if tiers.has_budget:
        assert tier.stats().num_blobs == 2
        assert tier.stats().nbytes == 2 * tiers.cost(LARGE)
        assert tier.delete_many(keys(0)) == 1  # and what continues it, of no use without it
        assert tier.stats().num_blobs == 0
    else:
        assert tier.delete_many(keys(0, 1)) == 2
    assert tier.contains_many(keys(0, 1)) == [False, False]
    assert tier.put_many(chain(1, 2, SMALL)) == 1
    assert tier.get_many([key(1)]) == [blob_of(1, SMALL)]


def test_scan_finds_all_of_a_prefix_in_order(tiers: TierRig):
    tier = tiers.open()
    tier.put_many(chain(0, 3, LARGE))
    records = {b"r%02d}*?" % i: b"record %d" % i for i in range(20)}
    for name, record in reversed(records.items()):
        tier.replace(name, record)
    assert list(tier.scan(b"r")) == list(records.items())
    assert [name for name, _ in tier.scan(b"r1")] == list(records)[10:]
    assert list(tier.scan(b"x")) == []


def test_two_keys_where_one_begins_like_the_other(tiers: TierRig):
    tier = tiers.open()
    tier.put_many([(b"k", b"short"), (b"k\x00\x00", b"long"), (b"k\x00\x01", b"longer")])
    assert tier.delete_many([b"k"]) == 1
    assert tier.get_many([b"k", b"k\x00\x00", b"k\x00\x01"]) == [None, b"long", b"longer"]


def test_stats_name_the_tier(tiers: TierRig):
    tier = tiers.open(12 << 20)
    assert tier.get_many([b"k"]) == [None]  # a server is available once it answered
    stats = tier.stats()
    assert (stats.name, stats.available, stats.errors) == (tiers.kind.split()[-1], True, 0)
    if tiers.has_budget:
        assert (stats.capacity_bytes, stats.nbytes, stats.num_blobs) == (12 << 20, 0, 0)
    assert tier.name == tiers.kind.split()[-1]


def test_many_threads_at_once(tiers: TierRig):
    tier = tiers.open(20 * tiers.cost(SMALL))
    wrong: list[object] = []

    def work(worker: int) -> None:
        for i in range(60):
            number = (worker * 31 + i * 7) % 40
            tier.put_many(chain(number, number + 3))
            tier.pin(key(number), True)
            (found,) = tier.get_many([key(number)])
            if found is not None and found != blob_of(number, SMALL):
                wrong.append(number)
            tier.touch(keys(number, number + 1))
            tier.pin(key(number), False)
            if i % 5 == 0:
                tier.delete_many([key(number)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert wrong == []
    if tiers.has_budget:
        assert tier.stats().nbytes <= tier.stats().capacity_bytes
    assert tier.put_many(chain(50, 55)) == 5  # no pin is left
