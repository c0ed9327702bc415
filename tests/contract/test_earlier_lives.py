"""Sessions that only Redis has, when their engine comes back: listed, moved and forgotten again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvstore.config import StoreConfig
from kvstore.errors import TierUnavailable
from kvstore.ledger.ledger import LOOK_S, MOST_LOADS
from kvstore.ledger.notices import StoreNotice
from kvstore.session import SessionRef
from kvstore.tenant_bytes import NO_LIMITS
from kvstore.tiers.base import Tier
from kvstore.tiers.ram_tier import RamTier
from kvstore.tiers.redis_server.link import RedisLink
from kvstore.tiers.registry import open_tiers
from kvstore.tiers.seal import Seal, SealedTier
from tests.contract.store_rig import LONG, MIB, Rig, Store, history, listed, ref
from tests.kv_sessions import come_back, save
from tests.redis_server import RedisServer
from tests.waiting import until

PATIENCE_S = 60.0
SEAL = Seal(bytes(32), "shared", encrypt=True)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def tiers_of(server: RedisServer, folder: Path, redis_bytes: int = 64 * MIB) -> list[Tier]:
    """The tiers of an engine without a disk, whose memory ends with it."""
    config = StoreConfig(
        ram_bytes=0,
        disk_bytes=0,
        redis_url=server.url,
        redis_bytes=redis_bytes,
        redis_deadline_s=2.0,
    )
    (shared,) = open_tiers(config, folder)
    return [RamTier(64 * MIB), SealedTier(shared, SEAL)]


def come_to_list(store: Store, ids: set[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while (now := listed(store)) != ids:
        assert time.monotonic() < end, f"{now} are listed instead of {ids}"
        time.sleep(0.02)


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


def test_they_are_listed_continued_and_forgotten(rig: Rig, server: RedisServer, tmp_path: Path):
    lived(rig, server, tmp_path, "a", "b")
    store = rig.open(tiers_of(server, tmp_path))
    come_to_list(store, {"a", "b"})
    assert store.tier_of(store.record(ref("a"))) == "redis"
    assert rig.back(store, ref("a"), [*LONG, *history(20, 9)]).num_tokens == 96
    assert store.forget(ref("a")) and store.forget(ref("b"))
    assert listed(store) == set()
    with redis.Redis.from_url(server.url) as client:
        assert client.keys() == []
    store.close()


def test_the_listener_gets_one_notice(rig: Rig, server: RedisServer, tmp_path: Path):
    lived(rig, server, tmp_path, "a", "b")
    store = rig.open(tiers_of(server, tmp_path))
    notices: list[StoreNotice] = []
    store.listen(notices.append)
    until(lambda: notices)
    assert notices == [StoreNotice(SessionRef("t", "b", b""), "found", is_gone=False)]
    store.close()


def test_a_pinned_one_stays_where_there_is_room_for_few(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    """It is the oldest, and the next life has half the budget."""
    shares = {"pinned_share": 0.9, "tenant_pinned_share": 1.0}
    store = rig.open(shared := tiers_of(server, tmp_path), **shares)
    rig.save(store, ref("pinned"), history(100, 0))
    store.pin(ref("pinned"), True)
    for number, session_id in enumerate("abcde", 1):
        rig.save(store, ref(session_id), history(100, number))
    budget = shared[1].stats().nbytes // 2
    store.close()
    store = rig.open(shared := tiers_of(server, tmp_path, budget), **shares)
    end = time.monotonic() + PATIENCE_S
    while shared[1].limit_tenants(NO_LIMITS) is None:  # not all is counted
        assert time.monotonic() < end
        time.sleep(0.02)
    assert shared[1].stats().nbytes <= budget
    prompt = history(20, 9)
    assert rig.back(store, ref("pinned"), [*history(100, 0), *prompt]).num_tokens == 96
    assert rig.back(store, ref("a"), [*history(100, 1), *prompt]).num_tokens == 0
    store.close()


def test_one_that_was_saved_again_stays_as_it_is_now(rig: Rig, server: RedisServer, tmp_path: Path):
    lived(rig, server, tmp_path, "a", "b")
    server.stop()
    store = rig.open(tiers_of(server, tmp_path))
    rig.save(store, ref("a"), [*LONG, *history(20, 9)])
    assert listed(store) == {"a"}
    server.cont()
    come_to_list(store, {"a", "b"})
    assert store.record(ref("a")).num_tokens == 112
    store.close()


def test_one_that_is_forgotten_while_records_are_read_stays_forgotten(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    lived(rig, server, tmp_path, "a", "b")
    server.stop()
    store = rig.open(tiers_of(server, tmp_path))
    index, read = store.ledger.index, store.ledger.stack.get
    key = store.ledger.record_key(ref("a"))

    def forgotten_meanwhile(level, asked):
        blobs = read(level, asked)
        index.remove(key)
        return blobs

    store.ledger.stack.get = forgotten_meanwhile
    server.cont()
    come_to_list(store, {"b"})
    assert store.ledger.index.is_whole
    store.close()


def test_one_that_was_forgotten_while_redis_was_away_stays_forgotten(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    lived(rig, server, tmp_path, "a", "b")
    server.stop()
    store = rig.open(tiers_of(server, tmp_path))
    rig.save(store, ref("a"), [*LONG, *history(20, 9)])
    assert store.forget(ref("a"))
    server.cont()
    come_to_list(store, {"b"})
    time.sleep(2 * LOOK_S)
    assert listed(store) == {"b"} and store.record(ref("a")) is None
    assert rig.back(store, ref("a"), [*LONG, *history(20, 9)]).num_tokens == 0
    store.close()


def test_one_that_was_forgotten_before_the_end_stays_forgotten(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    """Redis was away until the process ended; the next life deletes it before it lists others."""
    store = rig.open(tiers_of(server, tmp_path))
    rig.save(store, ref("a"), history(100, 0))
    rig.save(store, ref("b"), history(100, 1))
    assert store.flush(30.0)
    server.stop()
    assert store.forget(ref("a"))
    store.close()
    store = rig.open(tiers_of(server, tmp_path))  # Redis is still away
    store.close()
    server.cont()
    store = rig.open(tiers_of(server, tmp_path))
    come_to_list(store, {"b"})
    assert store.record(ref("a")) is None
    assert rig.back(store, ref("a"), [*history(100, 0), *history(20, 9)]).num_tokens == 0
    assert store.forget(ref("b"))
    with redis.Redis.from_url(server.url) as client:
        assert client.keys() == []
    store.close()
    (file,) = tmp_path.glob("redis-deletions")
    assert file.read_bytes() == b""


def test_a_deletion_of_an_earlier_life_leaves_what_was_saved_since(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    """Saved again, and another session of the same tokens, before the deletion was made up for."""
    store = rig.open(tiers := tiers_of(server, tmp_path))
    rig.save(store, ref("a"), history(100, 0))
    rig.save(store, ref("gone"), history(100, 1))
    assert store.flush(30.0)
    server.stop()
    assert store.forget(ref("a")) and store.forget(ref("gone"))
    owed = (tmp_path / "redis-deletions").read_bytes()
    server.cont()
    come_to_answer(tiers[1])
    rig.save(store, ref("a"), history(100, 0))
    rig.save(store, ref("same"), history(100, 1))
    assert store.flush(30.0)
    store.close()
    (tmp_path / "redis-deletions").write_bytes(owed)  # it ended before the next look
    store = rig.open(tiers_of(server, tmp_path))
    come_to_list(store, {"a", "same"})
    until(lambda: not (tmp_path / "redis-deletions").read_bytes())
    assert listed(store) == {"a", "same"}
    for name, seed in (("a", 0), ("same", 1)):
        assert rig.back(store, ref(name), [*history(100, seed), *history(20, 9)]).num_tokens == 96
    store.close()


def test_a_deletion_of_an_earlier_life_leaves_what_another_engine_saved_since(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    store = rig.open(tiers_of(server, tmp_path / "one"))
    rig.save(store, ref("a"), history(100, 0))
    assert store.flush(30.0)
    server.stop()
    assert store.forget(ref("a"))
    store.close()
    server.cont()
    other = rig.open(tiers_of(server, tmp_path / "other"))
    rig.save(other, ref("a"), [*history(100, 0), *history(20, 7)])
    assert other.flush(30.0)
    store = rig.open(tiers_of(server, tmp_path / "one"))
    until(lambda: not (tmp_path / "one" / "redis-deletions").read_bytes())
    store.close()
    other.close()
    other = rig.open(tiers_of(server, tmp_path / "other"))
    come_to_list(other, {"a"})
    tokens = [*history(100, 0), *history(20, 7), *history(20, 9)]
    assert rig.back(other, ref("a"), tokens).num_tokens == 112
    other.close()


def test_a_record_that_is_refused_for_a_while_is_read_later(
    rig: Rig, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Part of a cluster is down; another record is read meanwhile."""
    lived(rig, server, tmp_path, "a", "b")
    refused = [True]
    run = RedisLink.run

    def without_a(link: RedisLink, commands, *args, **options):
        replies = run(link, commands, *args, **options)
        for i, command in enumerate(commands if refused else ()):
            if command[0] in ("GET", "EXISTS") and key.hex().encode() in command[1]:
                replies[i] = redis.ResponseError("CLUSTERDOWN Hash slot not served")
        return replies

    probe = rig.open([RamTier(1 << 20)])
    key = probe.ledger.record_key(ref("a"))
    probe.close()
    monkeypatch.setattr(RedisLink, "run", without_a)
    store = rig.open(tiers_of(server, tmp_path))
    come_to_list(store, {"b"})
    refused.clear()
    come_to_list(store, {"a", "b"})
    store.close()


def test_one_that_another_engine_continued_is_not_listed(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    lived(rig, server, tmp_path / "one", "a", "b")
    other = rig.open(tiers_of(server, tmp_path / "other"))
    rig.save(other, ref("a"), [*history(100, 0), *history(20, 9)])
    assert other.flush(30.0)
    store = rig.open(shared := tiers_of(server, tmp_path / "one"))
    until(lambda: shared[1].written(b"r") is not None)
    come_to_list(store, {"b"})
    time.sleep(2 * LOOK_S)
    assert listed(store) == {"b"}
    store.close()
    other.close()


def test_records_that_can_never_be_read_are_given_up(
    rig: Rig, server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Redis has them, and their contents are of no use."""
    monkeypatch.setattr("kvstore.ledger.ledger.LOOK_S", 0.05)
    lived(rig, server, tmp_path, "a", "b")
    tiers = tiers_of(server, tmp_path)
    store = rig.open(tiers)
    key = store.ledger.record_key(ref("a"))
    reads: list[int] = []
    read = store.ledger.stack.get

    def unreadable(level, asked):
        reads.extend(1 for x in asked if x == key)
        return [
            None if x == key else blob for x, blob in zip(asked, read(level, asked), strict=True)
        ]

    store.ledger.stack.get = unreadable
    come_to_list(store, {"b"})
    until(lambda: not store.ledger._to_load)
    assert MOST_LOADS <= len(reads) <= MOST_LOADS + 2
    store.close()


def test_the_longest_unused_are_left_out_where_there_is_no_room(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    store = rig.open([RamTier(64 * MIB)])
    rig.save(store, ref("one"), LONG)
    nbytes = store.ledger.index._nbytes
    store.close()
    lived(rig, server, tmp_path, *"abcdef")
    store = rig.open(tiers_of(server, tmp_path), index_bytes=3 * nbytes + nbytes // 2)
    rig.save(store, ref("now"), LONG)
    come_to_list(store, {"now", "e", "f"})
    store.close()


def test_those_of_another_engine_are_not_listed(rig: Rig, server: RedisServer, tmp_path: Path):
    lived(rig, server, tmp_path / "one", "a")
    store = rig.open(shared := tiers_of(server, tmp_path / "other"))
    rig.save(store, ref("b"), history(100, 7))
    until(lambda: shared[1].written(b"r") is not None)
    assert listed(store) == {"b"}
    assert rig.back(store, ref("a"), [*history(100, 0), *history(20, 9)]).num_tokens == 96
    store.close()


def test_a_session_that_is_saved_before_it_is_known_and_then_deleted_leaves_nothing(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    store = rig.open(tiers_of(server, tmp_path))
    rig.save(store, ref("a"), history(200, 1))
    store.pin(ref("a"), True)
    store.close()
    store = rig.open(tiers_of(server, tmp_path))
    assert "a" not in listed(store)
    rig.save(store, ref("a"), history(100, 2))  # another conversation, of the same name
    assert store.record(ref("a")).pinned
    assert store.forget(ref("a"))
    assert store.flush(10)
    with redis.Redis.from_url(server.url) as client:
        assert client.keys() == []
    store.close()


def test_a_save_before_the_others_are_known_leaves_the_state_that_they_share(
    rig: Rig, server: RedisServer, tmp_path: Path
):
    store = rig.open(tiers_of(server, tmp_path), needs_state=True)
    beginning, ends = history(64, 1), {"a": history(16, 5), "b": history(16, 6)}
    for name, end in ends.items():
        save(store, ref(name), [*beginning, *end], [64])
    store.close()
    store = rig.open(tiers_of(server, tmp_path), needs_state=True)
    assert listed(store) == set()
    save(store, ref("a"), history(80, 3), [64])  # another conversation, of the same name
    come_to_list(store, {"a", "b"})
    prompt = [*beginning, *ends["b"], *history(4, 7)]
    assert come_back(store, ref("b"), prompt)[1].num_tokens == 64
    store.close()


def test_a_list_waits_for_them(rig: Rig, server: RedisServer, tmp_path: Path):
    lived(rig, server, tmp_path, "a", "b")
    store = rig.open(tiers_of(server, tmp_path))
    assert {x.id for x in store.records(PATIENCE_S)} == {"a", "b"}
    store.close()


def test_a_list_does_not_wait_for_ever(rig: Rig, server: RedisServer, tmp_path: Path):
    lived(rig, server, tmp_path, "a")
    server.stop()
    store = rig.open(tiers_of(server, tmp_path))
    began = time.monotonic()
    assert store.records(PATIENCE_S) == []
    assert time.monotonic() - began < PATIENCE_S
    began = time.monotonic()
    assert store.records(PATIENCE_S) == []
    assert time.monotonic() - began < LOOK_S, "it was waited for once"
    server.cont()
    store.close()
