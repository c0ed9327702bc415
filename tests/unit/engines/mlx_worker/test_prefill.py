from __future__ import annotations

import numpy as np
import pytest

from engines.mlx_worker.arrivals import MAX_CUTS, cuts
from engines.mlx_worker.generation import Generation, Row
from engines.mlx_worker.prefill import OLDEST_EVERY, Feeder, Pace
from engines.mlx_worker.stream import EventStream
from engines.mlx_worker.turn import Prompt, Turn, split_turn

pytestmark = pytest.mark.mlx


def prompt(num_tokens: int, done: int = 0, boundaries: tuple[int, ...] = ()) -> Prompt:
    generation = Generation([1] * num_tokens, [Row()], 5, [], boundaries=boundaries)
    turn = Turn(generation, EventStream(1, lambda row: None))
    return Prompt(turn, [], np.ones(num_tokens, np.int32), done=done)


def test_chunks_follow_the_speed_of_the_machine() -> None:
    pace = Pace(512)
    assert (pace.chunk(busy=True), pace.chunk(busy=False)) == (32, 128)  # nothing known yet
    for _ in range(60):
        pace.took(100, 100 / 300)
    assert (pace.chunk(busy=True), pace.chunk(busy=False)) == (64, 256)
    pace.took(3, 60.0)  # a tiny chunk says nothing
    assert pace.chunk(busy=False) == 256
    for _ in range(60):
        pace.took(100, 0.001)
    assert (pace.chunk(busy=True), pace.chunk(busy=False)) == (512, 512)


def test_a_slow_machine_is_not_given_ever_smaller_chunks() -> None:
    pace = Pace(512)
    for _ in range(60):
        pace.took(128, 30.0)
    assert (pace.chunk(busy=True), pace.chunk(busy=False)) == (32, 128)
    assert Pace(16).chunk(busy=False) == 16  # the setting is a limit


def test_the_shortest_goes_first_and_the_oldest_is_not_starved() -> None:
    feeder = Feeder(None, 512)
    old, short, long = prompt(5000), prompt(100), prompt(900)
    for x in (old, short, long):
        feeder.add(x)
    order = [feeder.next() for _ in range(2 * OLDEST_EVERY)]
    assert order.count(old) == 2 and order.count(short) == 2 * OLDEST_EVERY - 2
    feeder.discard(short)
    assert feeder.next() is long
    assert len(feeder) == 2


def test_cuts_are_the_boundaries_that_are_still_to_come_and_the_end() -> None:
    assert cuts(prompt(100, 0, (30, 60, 99, 100))) == [30, 60, 99]
    assert cuts(prompt(100, 30, (30, 60))) == [60, 99]
    assert cuts(prompt(100, 99, (30, 60))) == []


def test_of_many_boundaries_the_first_and_the_last_are_cut_at() -> None:
    many = tuple(range(10, 90, 10))
    found = cuts(prompt(100, 0, many))
    assert found == [10, 70, 80, 99] and len(found) == MAX_CUTS


def test_a_prompt_stops_at_each_cut_and_at_its_end() -> None:
    one = prompt(100)
    one.cuts = (30, 60, 99)
    stops = []
    while one.done < one.target:
        one.done = one.next_stop
        stops.append(one.done)
    assert stops == [30, 60, 99]


def test_a_turn_is_split_into_groups_of_rows() -> None:
    generation = Generation([1, 2, 3], [Row()] * 5, 7, [])
    turn = Turn(generation, EventStream(5, lambda row: None))
    prompts = split_turn(turn, 7, 2)
    assert [[row.index for row in x.rows] for x in prompts] == [[0, 1], [2, 3], [4]]
    assert all(x.target == 2 for x in prompts)
    assert all(row.remaining == 7 and row.tokens == [1, 2, 3] for row in turn.rows)
