"""The link to a Redis server, and the breaker that stops calls to one that does not answer."""

import contextlib
import subprocess
import sys
import threading
import time

import pytest

from kvstore.errors import TierUnavailable
from kvstore.tiers.redis_server.link import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    THRESHOLD,
    Breaker,
    BreakerState,
    RedisLink,
)
from kvstore.tiers.redis_server.redis_tier import RedisTier
from kvstore.urls import masked
from tests.clock import Clock
from tests.redis_server import RedisServer


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host", "redis://host"),
        ("unix:///run/redis.sock?db=0", "unix:///run/redis.sock?db=0"),
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("rediss://user:s%65cret@host", "rediss://user:***@host"),
        ("redis://host/0?db=2&password=secret", "redis://host/0?db=2&password=***"),
        ("unix://:secret@/run/redis.sock", "unix://:***@/run/redis.sock"),
        ("user:secret@host", "***"),
        ("redis:/:secret@host", "***"),
        ("redis://user:sec/ret@host:1/0", "***"),
        ("redis://user:1?secret@host:1/0", "***"),
        ("redis://user:1#secret@host:1/0", "***"),
        ("redis://host?sentinel_password=a@b", "redis://host?sentinel_password=***"),
        ("redis://[bad", "***"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert masked(url) == shown


@pytest.mark.parametrize(
    "url",
    ["http://:secret@host", "redis:/:secret@host", "redis://:secret@host:99999999"]
    + ["redis+cluster://:secret@", "redis+cluster://:secret@host/3"],
)
def test_a_bad_url_is_named_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="redis_url") as caught:
        RedisLink(url, 1.0)
    assert "secret" not in str(caught.value)


def test_the_password_is_in_no_repr() -> None:
    tier = RedisTier("redis://:secret@127.0.0.1:1/0", deadline_s=0.1)
    assert "secret" not in repr(tier)
    tier.close()


def test_without_redis_py_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['redis'] = None; import kvstore.tiers.redis_server.redis_tier"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'thermocline[redis]'" in done.stderr


@pytest.mark.redis
def test_who_uses_a_link_that_closes_hears_that_it_is_not_there() -> None:
    """Anything else would end the thread; redis-py raises TypeError among others."""
    others: list[Exception] = []

    def use(link: RedisLink) -> None:
        try:
            with contextlib.suppress(TierUnavailable):
                for _ in range(3):
                    link.run([("PING",)] * 20)
        except Exception as error:
            others.append(error)

    with RedisServer() as server:
        for i in range(600):
            link = RedisLink(server.url, 5.0)
            user = threading.Thread(target=use, args=(link,))
            user.start()
            time.sleep(i % 60 * 5e-5)
            link.close()
            user.join()
    assert not others


def opened() -> tuple[Breaker, Clock]:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(THRESHOLD):
        fail(breaker)
    return breaker, clock


def fail(breaker: Breaker) -> None:
    permit = breaker.ask()
    assert permit is not None
    breaker.fail(permit)


def succeed(breaker: Breaker) -> None:
    permit = breaker.ask()
    assert permit is not None
    breaker.succeed(permit)


def test_stays_closed_while_failures_are_not_in_a_row() -> None:
    breaker = Breaker(Clock())
    for _ in range(3 * THRESHOLD):
        for _ in range(THRESHOLD - 1):
            fail(breaker)
        succeed(breaker)
    assert breaker.state is BreakerState.CLOSED


def test_opens_after_failures_in_a_row() -> None:
    breaker, _ = opened()
    assert breaker.state is BreakerState.OPEN
    assert breaker.ask() is None


def test_lets_one_probe_out_after_the_wait() -> None:
    breaker, clock = opened()
    clock.now += FIRST_WAIT_S - 0.01
    assert breaker.ask() is None
    clock.now += 0.01
    assert breaker.ask() is not None
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.ask() is None


def test_a_good_probe_closes_it() -> None:
    breaker, clock = opened()
    clock.now += FIRST_WAIT_S
    succeed(breaker)
    assert breaker.state is BreakerState.CLOSED
    for _ in range(THRESHOLD - 1):
        fail(breaker)
    assert breaker.state is BreakerState.CLOSED  # the count began anew


def test_bad_probes_double_the_wait_up_to_a_bound() -> None:
    breaker, clock = opened()
    wait = FIRST_WAIT_S
    for _ in range(10):
        clock.now += wait
        fail(breaker)
        wait = min(2 * wait, LONGEST_WAIT_S)
        clock.now += wait - 0.01
        assert breaker.ask() is None
        clock.now += 0.01 - wait
    assert wait == LONGEST_WAIT_S


def test_results_of_calls_from_before_the_change_do_not_count() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    early, late = breaker.ask(), breaker.ask()
    assert early is not None and late is not None
    for _ in range(THRESHOLD):
        fail(breaker)
    breaker.succeed(early)
    assert breaker.state is BreakerState.OPEN
    clock.now += FIRST_WAIT_S
    assert breaker.ask() is not None
    breaker.fail(late)
    assert breaker.state is BreakerState.HALF_OPEN
