"""Sessions that only Redis has, when their engine comes back: continued, pinned, and forgotten."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvstore.blobs.chain import CHUNK
from kvstore.config import StoreConfig
from kvstore.errors import TierUnavailable
from kvstore.ledger.ledger import LOOK_S
from kvstore.tiers.base import Tier
from kvstore.tiers.ram_tier import RamTier
from kvstore.tiers.registry import open_tiers
from kvstore.tiers.seal import Seal, SealedTier
from tests.contract.store_rig import LONG, MIB, Rig, blobs_of, history, listed, ref
from tests.faulty_tier import FaultyTier
from tests.redis_server import RedisServer
from tests.waiting import until

PATIENCE_S = 60.0
SEAL = Seal(bytes(32), "shared", encrypt=True)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def tiers_of(server: RedisServer, folder: Path) -> list[Tier]:
    """The tiers of an engine without a disk, whose memory ends with it."""
    config = StoreConfig(ram_bytes=0, disk_bytes=0, redis_url=server.url, redis_deadline_s=2.0)
    (shared,) = open_tiers(config, folder)
    return [RamTier(64 * MIB), SealedTier(shared, SEAL)]


def come_to_answer(tier: Tier) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            tier.contains_many([b"r"])
            return
        except TierUnavailable:
            assert time.monotonic() < end
            time.sleep(0.05)


def lived(rig: Rig, server: RedisServer, folder: Path, *ids: str) -> None:
    """Have an engine save sessions and end; its memory is lost."""
    store = rig.open(tiers_of(server, folder))
    for number, session_id in enumerate(ids):
        rig.save(store, ref(session_id), history(100, number))
    store.close()


def is_empty(server: RedisServer) -> bool:
    with redis.Redis.from_url(server.url) as client:
        return client.keys() == []


def test_they_are_found_continued_and_forgotten(rig: Rig, server: RedisServer, tmp_path: Path):
    lived(rig, server, tmp_path, "a", "b")
    store = rig.open(tiers_of(server, tmp_path))
    assert store.tier_of(store.record(ref("a"))) == "redis"
    assert rig.back(store, ref("a"), [*LONG, *history(20, 9)]).num_tokens == 96
    assert store.forget(ref("a")) and store.forget(ref("b"))
    assert listed(store) == set()
    assert is_empty(server)
    store.close()


def test_one_that_was_saved_again_stays_as_it_is_now(rig: Rig, server: RedisServer, tmp_path: Path):
    lived(rig, server, tmp_path, "a", "b")
    server.stop()
    store = rig.open(tiers_of(server, tmp_path))
    rig.save(store, ref("a"), [*LONG, *history(20, 9)])
    server.cont()
    until(lambda: store.record(ref("b")) is not None)
    assert store.record(ref("a")).num_tokens == 112
    store.close()


def test_one_that_rests_in_redis_alone_is_not_taken_for_lost_while_that_is_away(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    lived(rig, server, tmp_path, "a")
    store = rig.open(tiers_of(server, tmp_path))
    record = store.record(ref("a"))
    server.stop()
    assert store.tier_of(record) == "redis"
    server.cont()
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    until(lambda: store.tier_of(record) is None)
    store.close()


@pytest.mark.slow
def test_one_that_was_forgotten_while_redis_was_away_stays_forgotten(rig, server, tmp_path):
    lived(rig, server, tmp_path, "a", "b")
    server.stop()
    store = rig.open(tiers_of(server, tmp_path))
    rig.save(store, ref("a"), [*LONG, *history(20, 9)])
    assert store.forget(ref("a"))
    server.cont()
    until(lambda: store.record(ref("b")) is not None)
    assert store.record(ref("a")) is None
    time.sleep(2 * LOOK_S)
    assert store.record(ref("a")) is None
    assert rig.back(store, ref("a"), [*LONG, *history(20, 9)]).num_tokens == 0
    store.close()


@pytest.mark.slow
def test_one_that_was_forgotten_before_the_end_stays_forgotten(rig, server, tmp_path):
    """Redis was away until the process ended; the next life deletes it, and does not find it."""
    store = rig.open(tiers_of(server, tmp_path))
    rig.save(store, ref("a"), history(100, 0))
    rig.save(store, ref("b"), history(100, 1))
    server.stop()
    assert store.forget(ref("a"))
    store.close()
    store = rig.open(tiers_of(server, tmp_path))  # Redis is still away
    store.close()
    server.cont()
    store = rig.open(tiers_of(server, tmp_path))
    assert store.record(ref("a")) is None
    until(lambda: store.record(ref("b")) is not None)
    assert store.record(ref("a")) is None
    assert rig.back(store, ref("a"), [*history(100, 0), *history(20, 9)]).num_tokens == 0
    assert store.forget(ref("b"))
    until(lambda: not (tmp_path / "redis-deletions").read_bytes())
    assert is_empty(server)
    store.close()
    (file,) = tmp_path.glob("redis-deletions")
    assert file.read_bytes() == b""


def test_what_a_tier_owes_to_delete_is_found_only_once_it_is_saved_again(rig: Rig):
    shared = FaultyTier(RamTier(64 * MIB), "redis")
    store = rig.open([RamTier(64 * MIB), shared])
    rig.save(store, ref("a"), LONG)
    shared.fails = lambda number, method: method == "delete_many"
    assert store.forget(ref("a"))
    held = [x for x in blobs_of(shared) if x[:1] == CHUNK]
    assert len(held) == 6
    assert rig.back(store, ref("b"), LONG).num_tokens == 0
    assert store.ledger.stack.lengths(1, held) == [None] * 6
    rig.save(store, ref("b"), LONG)
    assert store.demote(ref("b"), "redis") == "redis"
    assert blobs_of(store.ledger.stack.tiers[0]) == {}
    back = rig.back(store, ref("b"), LONG)
    assert (back.num_tokens, back.tier) == (96, "redis")


@pytest.mark.slow
def test_a_deletion_of_an_earlier_life_leaves_what_was_saved_since(rig, server, tmp_path):
    """It was saved again before the deletion was made up for."""
    store = rig.open(tiers := tiers_of(server, tmp_path))
    rig.save(store, ref("a"), history(100, 0))
    server.stop()
    assert store.forget(ref("a"))
    owed = (tmp_path / "redis-deletions").read_bytes()
    server.cont()
    come_to_answer(tiers[1])
    rig.save(store, ref("a"), history(100, 0))
    store.close()
    (tmp_path / "redis-deletions").write_bytes(owed)  # it ended before the next look
    store = rig.open(tiers_of(server, tmp_path))
    until(lambda: not (tmp_path / "redis-deletions").read_bytes())
    assert rig.back(store, ref("a"), [*history(100, 0), *history(20, 9)]).num_tokens == 96
    store.close()


@pytest.mark.slow
def test_a_deletion_of_an_earlier_life_leaves_what_another_engine_saved_since(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    store = rig.open(tiers_of(server, tmp_path / "one"))
    rig.save(store, ref("a"), history(100, 0))
    server.stop()
    assert store.forget(ref("a"))
    store.close()
    server.cont()
    other = rig.open(tiers_of(server, tmp_path / "other"))
    rig.save(other, ref("a"), [*history(100, 0), *history(20, 7)])
    store = rig.open(tiers_of(server, tmp_path / "one"))
    until(lambda: not (tmp_path / "one" / "redis-deletions").read_bytes())
    store.close()
    other.close()
    other = rig.open(tiers_of(server, tmp_path / "other"))
    tokens = [*history(100, 0), *history(20, 7), *history(20, 9)]
    assert rig.back(other, ref("a"), tokens).num_tokens == 112
    other.close()


def test_a_session_that_is_saved_before_it_is_known_and_then_deleted_leaves_nothing(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    store = rig.open(tiers_of(server, tmp_path))
    rig.save(store, ref("a"), history(200, 1))
    store.pin(ref("a"), True)
    store.close()
    store = rig.open(tiers_of(server, tmp_path))
    assert listed(store) == set()
    rig.save(store, ref("a"), history(100, 2))  # another conversation, of the same name
    assert store.record(ref("a")).pinned
    assert store.forget(ref("a"))
    assert store.flush(200)
    assert is_empty(server)
    store.close()
