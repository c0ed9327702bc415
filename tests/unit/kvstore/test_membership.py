"""Engines on one Redis find out what keeps them apart; who writes there else can hide it only."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.errors import TierUnavailable
from kvstore.membership import ALONE, Membership, joined
from kvstore.roster import ID_BYTES, LEASE_S, MAX_BYTES, SLOTS, EntrySeal, Facts, Roster
from kvstore.shapes import StoredModel
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.redis_server.link import RedisLink
from tests import kv_sessions
from tests.redis_server import RedisServer
from tests.waiting import until

pytestmark = pytest.mark.redis

SECRET, OTHER = b"s" * 32, b"o" * 32
FACTS = Facts(model="a model", fingerprint="f1", codec="tq3", chunk_tokens=128, release="1.0")
PATIENCE_S = 60.0


@contextmanager
def member(
    server: RedisServer, secret: bytes = SECRET, facts: Facts = FACTS, **more: object
) -> Iterator[Membership]:
    link = RedisLink(server.url, 2.0)
    membership = Membership(link, secret, lambda: facts, beat_s=0.05, **more)  # type: ignore[arg-type]
    try:
        yield membership
    finally:
        membership.close()


def kinds(membership: Membership) -> dict[str, int]:
    report = membership.report()
    return {x.kind: x.number for x in report.differing} if report else {}


def alike(membership: Membership) -> int:
    report = membership.report()
    return report.alike if report else -1


def roster(server: RedisServer, secret: bytes) -> Roster:
    return Roster(RedisLink(server.url, 2.0), EntrySeal(secret))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {}),
        ({"fingerprint": "f2"}, {"fingerprint": 1}),
        ({"codec": "tq3.1"}, {"codec": 1}),
        ({"hash_seed": "7"}, {"seed": 1}),
        ({"chunk_tokens": 64}, {"chunks": 1}),
        ({"encrypt": True}, {"encryption": 1}),
        ({"release": "2.0"}, {"release": 1}),
        ({"model": "another", "fingerprint": "f2", "codec": "x"}, {}),
        ({"part": "rank 1", "fingerprint": "f2"}, {}),
    ],
)
def test_engines_of_one_secret_name_their_differences(
    server: RedisServer, client: redis.Redis, change: dict[str, object], found: dict[str, int]
):
    other = msgspec.structs.replace(FACTS, **change)
    with member(server) as one, member(server, facts=other) as two:
        until(lambda: alike(one) == alike(two) == (not found))
        until(lambda: kinds(one) == kinds(two) == found)


def test_another_secret_is_reported_by_both_and_is_the_reason_of_misses(
    server: RedisServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO), ExitStack() as stack:
        one = stack.enter_context(member(server))
        until(lambda: one.report() is not None)
        assert one.why_unknown() == "never-stored"
        with member(server, OTHER) as two:
            until(lambda: kinds(one) == kinds(two) == {"secret": 1})
            assert one.why_unknown() == two.why_unknown() == "foreign-secret"
            assert one.why_diverged() == "diverged"
        until(lambda: kinds(one) == {})
        assert one.why_unknown() == "never-stored"
    said = [x.getMessage() for x in caplog.records if "another secret" in x.getMessage()]
    assert len(said) == 2  # once by each, however often it looked
    assert all("thermocline join" in x and "store.secret_file" in x for x in said)


def test_a_store_says_why_a_session_of_another_secret_is_unknown(
    server: RedisServer, client: redis.Redis
):
    tokens = kv_sessions.tokens(64)
    with member(server, OTHER), member(server) as company:
        until(lambda: kinds(company) == {"secret": 1})
        model = StoredModel("model", "f1", kv_sessions.LAYOUT, False)
        config = StoreConfig(codec="raw", num_threads=1)
        store = ColdStore(config, model, codec_by_name("raw"), [kv_sessions.ram()])
        chain = kv_sessions.chain_of(store, kv_sessions.ref(), tokens)
        store.ledger.join(company)
        unknown = kv_sessions.ref("unknown")
        assert store.match(unknown, chain).reason == "foreign-secret"
        kv_sessions.save(store, kv_sessions.ref(), tokens)
        # A beginning that another session of the tenant shares is no loss.
        assert store.match(unknown, chain).reason is None
        members = store.stats().members
        assert [x.kind for x in members.differing] == ["secret"]
        store.close()


def test_engines_that_name_blocks_by_another_seed_say_so(server: RedisServer, client: redis.Redis):
    seeded = msgspec.structs.replace(FACTS, hash_seed="7")
    with member(server) as one, member(server, facts=seeded):
        until(lambda: kinds(one) == {"seed": 1})
        assert one.why_diverged() == "foreign-seed"
        assert one.why_unknown() == "never-stored"


def test_an_entry_shows_nothing_to_who_lacks_the_secret(server: RedisServer, client: redis.Redis):
    with member(server) as one:
        until(lambda: len(client.keys()) == 1 and one.report() is not None)
        raw = client.get(client.keys()[0])
        assert raw is not None
        for word in (SECRET, b"a model", b"f1", b"tq3"):
            assert word not in raw
        (entry,) = roster(server, OTHER).look()
        assert entry.facts is None
        assert not entry.forged
        assert 0 < client.pttl(client.keys()[0]) <= LEASE_S * 1000
    assert client.keys() == []  # who leaves takes its entry along


def test_a_forged_moved_or_replayed_entry_is_no_engine(server: RedisServer, client: redis.Redis):
    seal, id = EntrySeal(SECRET), b"i" * ID_BYTES
    seconds, micros = client.time()
    now = seconds * 1000 + micros // 1000
    good = seal.write(SLOTS[0], id, FACTS, now)
    client.set(SLOTS[0], good)
    client.set(SLOTS[1], good)  # moved
    client.set(SLOTS[2], seal.write(SLOTS[2], b"o" * ID_BYTES, FACTS, now - 10 * 60_000))  # old
    client.set(SLOTS[3], seal.write(SLOTS[3], b"p" * ID_BYTES, FACTS, now + 10 * 60_000))
    found = roster(server, SECRET).look()
    assert [(x.id, x.forged) for x in found] == [(id, False), (id, True)]


def test_a_server_full_of_rubbish_hides_engines_and_does_no_more(
    server: RedisServer, client: redis.Redis
):
    for slot in SLOTS[2:]:
        client.set(slot, b"\xff" * (MAX_BYTES + 10))
    client.rpush(SLOTS[0], "of another type")
    client.set(SLOTS[1], b"x" * (32 << 20))
    with member(server) as one:
        until(lambda: one.report() is not None)
        assert kinds(one) == {}
        assert one.why_unknown() == "never-stored"
    assert client.strlen(SLOTS[1]) == 32 << 20  # not ours, so left alone


def test_without_a_server_nothing_is_known_after_a_lease(client: redis.Redis):
    skipped = [0.0]
    with (
        RedisServer() as own,
        member(own, OTHER),
        member(own, monotonic=lambda: time.monotonic() + skipped[0]) as one,
    ):
        until(lambda: kinds(one) == {"secret": 1})
        own.stop()
        skipped[0] = LEASE_S + 5
        try:
            until(lambda: one.report() is None)
            assert one.why_unknown() == "never-stored"
        finally:
            own.cont()
        until(lambda: kinds(one) == {"secret": 1})


def test_a_slot_that_another_took_is_left_to_it(server: RedisServer, client: redis.Redis):
    mine = roster(server, SECRET)
    mine.look()
    assert mine.keep(b"a" * ID_BYTES, FACTS)
    (slot,) = client.keys()
    client.set(slot, EntrySeal(OTHER).write(slot, b"b" * ID_BYTES, FACTS, 0))
    mine.look()
    assert mine.keep(b"a" * ID_BYTES, FACTS)
    assert {x.id for x in mine.look()} == {b"a" * ID_BYTES, b"b" * ID_BYTES}
    mine.leave(b"a" * ID_BYTES)
    assert client.keys() == [slot]


def test_a_refusal_is_no_entry_and_no_error_of_ours():
    with RedisServer("--rename-command", "GETRANGE", "") as refusing:
        with pytest.raises(TierUnavailable):
            roster(refusing, SECRET).look()
        with member(refusing) as one:
            assert one.why_unknown() == "never-stored"


def test_without_redis_there_is_no_company():
    assert joined(StoreConfig(), lambda: FACTS) is ALONE
    assert ALONE.report() is None


@given(st.binary(max_size=200), st.integers(0, 300), st.integers(0, 7))
def test_bytes_of_any_kind_are_read_without_an_error(noise: bytes, at: int, bit: int):
    seal = EntrySeal(SECRET)
    seal.read(SLOTS[0], noise)
    good = bytearray(seal.write(SLOTS[0], b"i" * ID_BYTES, FACTS, 5))
    at %= len(good)
    good[at] ^= 1 << bit
    entry = seal.read(SLOTS[0], bytes(good))
    assert entry is None or entry.facts is None
