from __future__ import annotations

from kvstore.tiers.redis_server.breaker import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    THRESHOLD,
    Breaker,
    BreakerState,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


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
