"""A store says what keeps it from the data on its Redis: in its log, and as reasons of misses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import redis

from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.likeness import KEPT_S, VALUE_BYTES, Likeness, RedisLikeness, StoredAs, likeness_of
from kvstore.shapes import StoredModel
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.redis_server.link import RedisLink
from tests import kv_sessions
from tests.redis_server import RedisServer
from tests.waiting import until

pytestmark = pytest.mark.redis

SECRET, OTHER = b"s" * 32, b"o" * 32
STORED = StoredAs(model="a model", fingerprint="f1", chunk_tokens=128, encrypt=False)


@contextmanager
def look(
    server: RedisServer, secret: bytes = SECRET, stored: StoredAs = STORED
) -> Iterator[RedisLikeness]:
    link = RedisLink(server.url, 2.0)
    likeness = RedisLikeness(link.run, stored, secret, link.close, look_s=0.05)
    try:
        yield likeness
    finally:
        likeness.close()


@contextmanager
def first(server: RedisServer, client: redis.Redis) -> Iterator[RedisLikeness]:
    """An engine whose data lies on the Redis before that of any other."""
    with look(server) as likeness:
        until(lambda: client.exists(STORED.key))
        yield likeness


@pytest.mark.parametrize(
    ("change", "differs", "unknown", "diverged"),
    [
        ({}, (), "never-stored", "diverged"),
        ({"fingerprint": "f2"}, ("fingerprint",), "fingerprint", "diverged"),
        ({"chunk_tokens": 64}, ("chunks",), "fingerprint", "diverged"),
        ({"hash_seed": "7"}, ("seed",), "never-stored", "foreign-seed"),
        ({"encrypt": True}, ("secret",), "foreign-secret", "diverged"),
        ({"model": "another", "fingerprint": "f2"}, (), "never-stored", "diverged"),
        ({"part": "rank 1", "fingerprint": "f2"}, (), "never-stored", "diverged"),
    ],
)
def test_differences_are_named_and_are_reasons_of_misses(
    server: RedisServer,
    client: redis.Redis,
    change: dict[str, object],
    differs: tuple[str, ...],
    unknown: str,
    diverged: str,
):
    other = msgspec.structs.replace(STORED, **change)
    with first(server, client) as one, look(server, stored=other) as two:
        until(lambda: client.exists(other.key))
        until(lambda: two.differs == differs)
        assert (two.why_unknown(), two.why_diverged()) == (unknown, diverged)
        assert one.differs == ()


def test_another_secret_is_said_once_and_until_its_data_is_gone(server, client, caplog):
    with caplog.at_level(logging.INFO), ExitStack() as held:
        one = held.enter_context(first(server, client))
        two = held.enter_context(look(server, OTHER))
        until(lambda: two.differs == ("secret",))
        one.close()
        assert two.why_unknown() == "foreign-secret"
        client.delete(STORED.key)
        until(lambda: two.differs == ())
    said = [x.getMessage() for x in caplog.records if "another secret" in x.getMessage()]
    assert len(said) == 1
    assert "store.secret_file" in said[0]


def test_a_store_says_why_a_session_of_another_secret_is_unknown(server, client):
    tokens = kv_sessions.tokens(64)
    with first(server, client), look(server, OTHER) as likeness:
        until(lambda: likeness.differs == ("secret",))
        model = StoredModel("model", "f1", kv_sessions.LAYOUT, False)
        config = StoreConfig(codec="raw")
        store = ColdStore(config, model, codec_by_name("raw"), [kv_sessions.ram()])
        chain = kv_sessions.chain_of(store, kv_sessions.ref(), tokens)
        store.ledger.likeness = likeness
        unknown = kv_sessions.ref("unknown")
        assert store.match(unknown, chain).reason == "foreign-secret"
        kv_sessions.save(store, kv_sessions.ref(), tokens)
        # A beginning that another session of the tenant shares is no loss.
        assert store.match(unknown, chain).reason is None
        assert store.stats().differs == ("secret",)
        store.close()


def test_a_value_shows_nothing_and_expires(server: RedisServer, client: redis.Redis):
    with first(server, client):
        raw = client.get(STORED.key)
        assert raw is not None
        assert len(raw) == VALUE_BYTES
        for word in (SECRET, b"a model", b"f1", b"128"):
            assert word not in raw + STORED.key
        assert 0 < client.ttl(STORED.key) <= KEPT_S


@pytest.mark.parametrize("forged", [b"", b"x", b"x" * 1_000_000])
def test_a_forged_value_is_another_secret_at_most(server, client, forged):
    client.set(STORED.key, forged)
    with look(server) as likeness:
        until(lambda: likeness.differs == (("secret",) if forged else ()))


def test_a_redis_that_is_away_changes_nothing(server: RedisServer, client: redis.Redis):
    with first(server, client) as one, look(server, OTHER) as likeness:
        until(lambda: likeness.differs == ("secret",))
        one.close()
        server.kill()
        assert likeness.why_unknown() == "foreign-secret"
        server.start()  # what lay there is gone
        until(lambda: likeness.differs == ())


def test_without_redis_nothing_differs():
    likeness = likeness_of(StoreConfig(), STORED)
    assert type(likeness) is Likeness
    assert likeness.differs == ()
