"""The Redis tier against a server that dies, hangs, is slow or says no. A real one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from kvstore.config import StoreConfig
from kvstore.errors import TierUnavailable
from kvstore.tiers.redis_server.link import FIRST_WAIT_S, THRESHOLD
from kvstore.tiers.redis_server.redis_tier import name_of
from kvstore.tiers.registry import open_tiers
from tests.faults.redis_tiers import DEADLINE_S, LONGEST_S, SlowLine, blobs, tier_at
from tests.redis_server import RedisServer
from tests.waiting import until

pytestmark = pytest.mark.redis


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
        assert tier.stats().errors == 3


def test_a_listener_that_says_nothing_is_not_available() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        tier_at(f"redis://127.0.0.1:{mute.getsockname()[1]}/0") as (tier, _),
    ):
        tier.greet()
        assert tier.stats().errors == 1
        assert not tier.stats().available


def test_a_server_is_greeted_when_the_tiers_are_opened(server: RedisServer, tmp_path: Path) -> None:
    config = StoreConfig(ram_bytes=0, disk_bytes=0, redis_url=server.url)
    (tier,) = open_tiers(config, tmp_path)
    until(lambda: tier.stats().available)
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
        assert tier.stats().errors == errors  # the server was not asked
        server.start()
        clock.skipped_s += FIRST_WAIT_S
        assert tier.get_many(list(stored)) == [None] * 4  # it came back empty
        assert tier.stats().available
        assert tier.put_many(list(stored.items())) == 4
        assert tier.get_many(list(stored)) == list(stored.values())


def test_a_hanging_server_holds_no_call_longer_than_the_deadline(server: RedisServer) -> None:
    stored = blobs(4)
    with tier_at(server.url) as (tier, clock):
        tier.put_many(list(stored.items()))
        server.stop()
        assert took(lambda: tier.get_many(list(stored))) < LONGEST_S
        assert took(lambda: tier.put_many([(b"x", bytes(3_000_000))])) < LONGEST_S
        assert took(lambda: tier.delete_many(list(stored))) < LONGEST_S
        assert took(lambda: tier.contains_many(list(stored))) < DEADLINE_S  # the breaker is open
        clock.skipped_s += FIRST_WAIT_S
        assert took(lambda: tier.get_many(list(stored))) < LONGEST_S  # the probe hangs as well
        clock.skipped_s += FIRST_WAIT_S
        assert took(lambda: tier.get_many(list(stored))) < DEADLINE_S  # twice the wait now
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


def test_a_wrong_password_is_said_without_the_password() -> None:
    with RedisServer("--requirepass", "correct-horse") as server:
        with tier_at(server.url) as (tier, _):
            assert tier.put_many([(b"k", b"blob")]) == 1
        with tier_at(server.url.replace("correct", "battery")) as (tier, _):
            with pytest.raises(TierUnavailable, match="(?i)password|auth") as caught:
                tier.get_many([b"k"])
            assert "battery" not in str(caught.value)


def test_a_slow_line_gives_the_blobs_that_came_in_time(server: RedisServer) -> None:
    stored = blobs(40)
    with RedisServer(tcp=True) as far, SlowLine(far.url, bytes_per_s=6_000_000) as line:
        with tier_at(far.url, deadline_s=10.0) as (near, _):
            near.put_many(list(stored.items()))
        with tier_at(line.url, deadline_s=2.5) as (tier, _):
            started = time.monotonic()
            found = tier.get_many(list(stored))
            assert time.monotonic() - started < 1.5 * 2.5 + 4.0
            count = sum(x is not None for x in found)
            assert 0 < count < 40
            assert found[:count] == list(stored.values())[:count]  # the head of the chain
            assert tier.stats().available


@pytest.mark.parametrize("command", ["get", "strlen", "exists", "del"])
def test_a_refused_read_or_removal_says_nothing_about_the_blob(server: RedisServer, command: str):
    """Part of a cluster that is down answers like this, as does a new access rule."""
    small, large = b"c-small", b"c-large"
    contents = {small: b"x" * 100, large: bytes(range(256)) * 8000}
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        assert tier.put_many(list(contents.items())) == 2
        client.execute_command("ACL", "SETUSER", "default", f"-{command}")
        errors = tier.stats().errors
        calls: dict[str, list[Callable[[], object]]] = {
            "get": [lambda: tier.get_many([small]), lambda: tier.get_many([large])],
            "strlen": [lambda: tier.lengths([small])],
            "exists": [lambda: tier.contains_many([small])],
            "del": [lambda: tier.delete_many([small])],
        }
        for call in calls[command]:
            with pytest.raises(TierUnavailable, match="no permissions"):
                call()
        assert tier.stats().errors > errors
        client.execute_command("ACL", "SETUSER", "default", f"+{command}")
        assert tier.get_many([small, large]) == [contents[small], contents[large]]
        assert tier.delete_many([small, large]) == 2
        assert client.keys() == []


def test_blobs_are_removed_where_unlink_is_forbidden(server: RedisServer):
    """Deleted and replaced blobs."""
    blob = bytes(range(256)) * 8000
    keys = [f"c-{i}".encode() for i in range(4)]
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-unlink")
        try:
            with tier_at(server.url) as (tier, _):
                for key in keys:
                    assert tier.put_many([(key, blob)], "t") == 1
                assert tier.replace(keys[0], blob[1:], "t")
                assert tier.delete_many(keys[:2]) == 2
                assert tier.contains_many(keys) == [False, False, True, True]
                assert tier.stats().errors == 0
        finally:
            client.execute_command("ACL", "SETUSER", "default", "+unlink")


def test_part_of_a_read_that_is_refused_removes_nothing(server: RedisServer):
    """One of two blobs, which the server may not give out."""
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many([(b"c-one", b"1"), (b"c-two", b"2")])
        rule = ("ACL", "SETUSER", "default", "resetkeys")
        client.execute_command(*rule, b"~" + name_of(b"c-one"))
        assert tier.get_many([b"c-one", b"c-two"]) == [b"1", None]
        client.execute_command(*rule, "~*")
        assert tier.get_many([b"c-one", b"c-two"]) == [b"1", b"2"]


def test_an_entry_of_another_type_is_no_blob(server: RedisServer):
    with tier_at(server.url) as (tier, _), redis.Redis.from_url(server.url) as client:
        tier.put_many([(b"c-one", b"1"), (b"c-two", b"2")])
        (name,) = [x for x in client.scan_iter() if b"c-one".hex().encode() in x]
        client.delete(name)
        client.rpush(name, "a list of another program")
        assert tier.get_many([b"c-one", b"c-two"]) == [None, b"2"]
        assert tier.lengths([b"c-one", b"c-two"]) == [None, 1]
