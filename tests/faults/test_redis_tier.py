"""The Redis tier against a server that dies, hangs, fills up, forgets or refuses. A real one."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from kvstore.config import StoreConfig
from kvstore.errors import TierUnavailable
from kvstore.tiers.breaker import FIRST_WAIT_S, THRESHOLD
from kvstore.tiers.redis_blobs import UNFINISHED_S
from kvstore.tiers.redis_pieces import PIECE_BYTES, head_name
from kvstore.tiers.redis_tier import RedisTier
from kvstore.tiers.registry import open_tiers
from tests.redis_server import RedisServer, find_binary

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(find_binary() is None, reason="no redis-server"),
]

AMPLE = 1 << 30
DEADLINE_S = 0.5
LONGEST_S = 1.5 * DEADLINE_S + 0.4  # what a call may take at most, and a busy machine


class Clock:
    """Real time that a test can move forward."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


@contextmanager
def tier_at(url: str, **options: float) -> Iterator[tuple[RedisTier, Clock]]:
    clock = Clock()
    tier = RedisTier(
        url,
        AMPLE,
        deadline_s=options.get("deadline_s", DEADLINE_S),
        ttl_s=options.get("ttl_s", 0.0),
        monotonic=clock,
    )
    try:
        yield tier, clock
    finally:
        tier.close()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def blobs(count: int, length: int = 700_000) -> dict[bytes, bytes]:
    return {b"c%032d" % i: random.Random(i).randbytes(length) for i in range(count)}


def names(client: redis.Redis) -> list[bytes]:
    return sorted(client.scan_iter())


def took(call: Callable[[], object]) -> float:
    started = time.monotonic()
    with pytest.raises(TierUnavailable):
        call()
    return time.monotonic() - started


def test_a_server_that_is_not_there_is_noticed_when_used(server: RedisServer) -> None:
    server.kill()
    with tier_at(server.url) as (tier, _):
        assert not tier.stats().available
        assert took(lambda: tier.get_many([b"c"])) < LONGEST_S
        assert not tier.stats().available  # a closed breaker alone says nothing
        assert took(lambda: tier.put_many([(b"c", b"blob")])) < LONGEST_S
        tier.touch([b"c"])  # never raises
        assert tier.stats().errors == 2
        assert tier.stats().num_blobs == 0


def test_a_listener_that_says_nothing_is_not_available() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        tier_at(f"redis://127.0.0.1:{mute.getsockname()[1]}/0") as (tier, _),
    ):
        tier.greet()
        assert tier.stats().errors == 1
        assert not tier.stats().available


def test_a_server_is_available_from_its_first_answer_on(server: RedisServer) -> None:
    with tier_at(server.url) as (tier, _):
        assert not tier.stats().available
        tier.greet()
        assert tier.stats().available


def test_a_server_is_greeted_when_the_tiers_are_opened(server: RedisServer, tmp_path: Path) -> None:
    config = StoreConfig(ram_bytes=0, disk_bytes=0, redis_url=server.url)
    (tier,) = open_tiers(config, tmp_path)
    end = time.monotonic() + 20
    while not tier.stats().available:
        assert time.monotonic() < end
        time.sleep(0.01)
    tier.close()


def test_a_killed_server_opens_the_breaker_and_a_new_one_closes_it(server: RedisServer) -> None:
    stored = blobs(4)
    with tier_at(server.url) as (tier, clock):
        assert tier.put_many(list(stored.items())) == 4
        server.kill()
        for _ in range(THRESHOLD):
            took(lambda: tier.get_many(list(stored)))
        assert not tier.stats().available
        errors = tier.stats().errors
        assert took(lambda: tier.get_many(list(stored))) < 0.05
        assert tier.stats().errors == errors  # nobody was asked
        server.start()
        clock.skipped_s += FIRST_WAIT_S
        assert tier.get_many(list(stored)) == [None] * 4  # it came back empty
        assert tier.stats().available
        assert tier.put_many(list(stored.items())) == 4
        assert tier.get_many(list(stored)) == list(stored.values())


def test_a_hanging_server_holds_nobody_longer_than_the_deadline(server: RedisServer) -> None:
    stored = blobs(4)
    with tier_at(server.url) as (tier, clock):
        tier.put_many(list(stored.items()))
        server.stop()
        assert took(lambda: tier.get_many(list(stored))) < LONGEST_S
        assert took(lambda: tier.put_many([(b"x", bytes(3_000_000))])) < LONGEST_S
        assert took(lambda: tier.delete_many(list(stored))) < LONGEST_S
        assert took(lambda: tier.contains_many(list(stored))) < 0.05  # the breaker is open
        clock.skipped_s += FIRST_WAIT_S
        assert took(lambda: tier.get_many(list(stored))) < LONGEST_S  # the probe hangs as well
        clock.skipped_s += FIRST_WAIT_S
        assert took(lambda: tier.get_many(list(stored))) < 0.05  # twice the wait now
        server.cont()
        clock.skipped_s += FIRST_WAIT_S
        assert tier.get_many(list(stored)) == list(stored.values())
        assert tier.get_many([b"x"]) == [None]


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("verb", ["get", "put"])
def test_a_fault_in_the_middle_of_a_call(server: RedisServer, verb: str, fault: str) -> None:
    """Whole blobs or none, the call ends in time, and so does every one after it."""
    stored = blobs(40)
    with tier_at(server.url) as (tier, _):
        tier.put_many(list(stored.items()))
        for moment in (0.002, 0.01, 0.03):
            timer = threading.Timer(moment, server.kill if fault == "kill" else server.stop)
            timer.start()
            started = time.monotonic()
            try:
                if verb == "get":
                    found = tier.get_many(list(stored))
                    assert all(
                        x in (None, stored[key]) for key, x in zip(stored, found, strict=True)
                    )
                else:
                    tier.put_many([(b"n" + key[1:], blob) for key, blob in stored.items()])
            except TierUnavailable:
                pass
            assert time.monotonic() - started < LONGEST_S + 1.0  # some exchanges may have passed
            timer.join()
            server.kill()
            server.start()
            check_whole(server.url, stored)


def check_whole(url: str, stored: dict[bytes, bytes]) -> None:
    with tier_at(url, deadline_s=10.0) as (fresh, _):
        for first in (b"c", b"n"):
            found = fresh.get_many([first + key[1:] for key in stored])
            assert all(x in (None, y) for x, y in zip(found, stored.values(), strict=True))
        assert fresh.put_many(list(stored.items())) == len(stored)
        assert fresh.get_many(list(stored)) == list(stored.values())


def test_a_blob_without_a_head_is_invisible_and_expires(server: RedisServer) -> None:
    """What a writer leaves that dies between the pieces and the head."""
    stored = blobs(1)
    (key,) = stored
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many(list(stored.items()))
        assert {client.ttl(name) for name in names(client)} == {-1}
        pieces = {name: client.get(name) for name in names(client) if name != head_name(key)}
        client.flushall()
        for name, piece in pieces.items():
            client.set(name, piece, ex=UNFINISHED_S)
        assert tier.contains_many([key]) == [False]
        assert tier.get_many([key]) == [None]
        assert tier.put_many(list(stored.items())) == 1
        assert {name for name in names(client) if client.ttl(name) > 0} == set(pieces)


def test_a_blob_with_an_evicted_piece_is_a_miss_and_can_be_stored_again(
    server: RedisServer,
) -> None:
    stored = blobs(3)
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many(list(stored.items()))
        victim = [x for x in names(client) if x.startswith(head_name(b"c%032d" % 1))][2]
        client.delete(victim)
        first, middle, last = tier.get_many(list(stored))
        assert (first, middle, last) == (stored[b"c%032d" % 0], None, stored[b"c%032d" % 2])
        assert tier.contains_many(list(stored)) == [True, False, True]
        assert tier.stats().errors == 0  # eviction is no error
        assert tier.put_many(list(stored.items())) == 3
        assert tier.get_many(list(stored)) == list(stored.values())


@pytest.mark.parametrize("length", [1000, 700_000])
def test_tampered_entries_are_misses(server: RedisServer, length: int) -> None:
    stored = blobs(1, length)
    (key,) = stored
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many(list(stored.items()))
        chance = random.Random(3)
        for _ in range(40):
            name = chance.choice(names(client))
            value = bytearray(client.get(name))
            value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
            client.set(name, bytes(value[: chance.choice((None, -1))]))
            assert tier.get_many([key]) == [None]
            client.flushall()
            assert tier.put_many(list(stored.items())) == 1
            assert tier.get_many([key]) == list(stored.values())
        assert tier.stats().errors >= 30  # a head that leads nowhere looks like an eviction


def test_a_full_server_that_evicts_gives_back_whole_blobs_only() -> None:
    stored = blobs(60)
    with (
        RedisServer("--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru") as server,
        tier_at(server.url, deadline_s=10.0) as (tier, _),
    ):
        for key, blob in stored.items():
            tier.put_many([(key, blob)])
        found = dict(zip(stored, tier.get_many(list(stored)), strict=True))
        whole = {key: blob for key, blob in found.items() if blob is not None}
        assert whole.items() <= stored.items()
        assert 0 < len(whole) < 40
        gone = [key for key in stored if key not in whole]
        assert tier.contains_many(gone) == [False] * len(gone)
        assert tier.stats().errors == 0


def test_a_full_server_that_may_not_evict_refuses_and_keeps_the_old() -> None:
    stored = blobs(60)
    with (
        RedisServer("--maxmemory", "24mb", "--maxmemory-policy", "noeviction") as server,
        tier_at(server.url, deadline_s=10.0) as (tier, _),
    ):
        kept = tier.put_many(list(stored.items()))
        assert 20 < kept < 35
        assert not tier.replace(b"r", bytes(3_000_000))
        found = tier.get_many(list(stored))
        assert sum(x is not None for x in found) == kept
        assert all(x in (None, y) for x, y in zip(found, stored.values(), strict=True))
        stats = tier.stats()
        assert stats.available  # a refusal is an answer
        assert stats.errors >= 60 - kept
        assert stats.num_blobs == kept
        with redis.Redis.from_url(server.url) as client:
            assert {client.ttl(name) for name in names(client)} == {-1}  # nothing half-written
        assert tier.delete_many(list(stored)) == kept
        assert tier.put_many(list(stored.items())[:10]) == 10


def test_a_wrong_password_is_said_without_the_password() -> None:
    with RedisServer("--requirepass", "correct-horse") as server:
        with tier_at(server.url) as (tier, _):
            assert tier.put_many([(b"k", b"blob")]) == 1
        with tier_at(server.url.replace("correct", "battery")) as (tier, _):
            with pytest.raises(TierUnavailable, match="(?i)password|auth") as caught:
                tier.get_many([b"k"])
            assert "battery" not in str(caught.value)


def test_a_read_only_replica_refuses_blobs_and_serves_reads(server: RedisServer) -> None:
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many([(b"k", b"blob")])
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert tier.get_many([b"k"]) == [b"blob"]
        assert tier.put_many([(b"new", b"blob")]) == 0
        assert tier.stats().available
        client.execute_command("REPLICAOF", "NO", "ONE")
        assert tier.put_many([(b"new", b"blob")]) == 1


def test_entries_expire_unless_touched(server: RedisServer) -> None:
    stored = blobs(2)
    kept, lost = stored
    with tier_at(server.url, ttl_s=30.0) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many(list(stored.items()))
        tier.replace(b"r", b"record")
        assert {client.ttl(name) for name in names(client)} <= {29, 30}
        for name in names(client):
            client.pexpire(name, 300)
        with tier_at(server.url, ttl_s=30.0) as (other, _):  # did not write them, but uses them
            other.touch([kept, b"r"])
        time.sleep(0.35)
        assert tier.get_many([kept, lost, b"r"]) == [stored[kept], None, b"record"]


def test_of_two_writers_the_last_wins_with_a_whole_blob(server: RedisServer) -> None:
    values = [random.Random(i).randbytes(3 * PIECE_BYTES + i) for i in range(2)]
    with (
        tier_at(server.url, deadline_s=20.0) as (one, _),
        tier_at(server.url, deadline_s=20.0) as (other, _),
    ):

        def write(tier: RedisTier, value: bytes) -> None:
            for _ in range(30):
                assert tier.replace(b"r", value)

        pair = zip((one, other), values, strict=True)
        threads = [threading.Thread(target=write, args=x) for x in pair]
        for thread in threads:
            thread.start()
        seen = [one.get_many([b"r"])[0] for _ in range(30)]
        for thread in threads:
            thread.join()
        assert set(seen) <= {None, *values}
        (last,) = other.get_many([b"r"])
        assert last in values
        pieces = -(-len(last) // PIECE_BYTES)  # three or four: which of the two was last
        with redis.Redis.from_url(server.url) as client:
            assert len(names(client)) == 1 + pieces  # and its head: the loser's are gone


def test_a_slow_line_gives_what_came_in_time(server: RedisServer) -> None:
    stored = blobs(40)
    with RedisServer(tcp=True) as far, SlowLine(far.url, bytes_per_s=20_000_000) as line:
        with tier_at(far.url, deadline_s=10.0) as (near, _):
            near.put_many(list(stored.items()))
        with tier_at(line.url, deadline_s=0.6) as (tier, _):
            started = time.monotonic()
            found = tier.get_many(list(stored))
            assert time.monotonic() - started < 1.5
            count = sum(x is not None for x in found)
            assert 0 < count < 40
            assert found[:count] == list(stored.values())[:count]  # the head of the chain
            assert tier.stats().available


class SlowLine:
    """A TCP proxy that passes on a few bytes at a time."""

    def __init__(self, url: str, bytes_per_s: int) -> None:
        self._target = int(url.rpartition(":")[2].partition("/")[0])
        self._pause_s = 65536 / bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._links: list[socket.socket] = []
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> SlowLine:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for link in self._links:
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._links += [near, far]
            threading.Thread(target=self._pass_on, args=(near, far, 0.0), daemon=True).start()
            threading.Thread(
                target=self._pass_on, args=(far, near, self._pause_s), daemon=True
            ).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, pause_s: float) -> None:
        try:
            while data := source.recv(65536):
                time.sleep(pause_s * len(data) / 65536)
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()
