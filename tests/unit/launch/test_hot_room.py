"""What a budget for live KV is good for, against what the engine would do with it."""

from __future__ import annotations

import pytest

from engines.kv_budget import alone_bytes, longest_context
from kvstore.shapes import KVLayer
from launch.cache_shape import CacheShape, Window
from launch.hot_room import HotRoom

MIB = 1 << 20
SMOLLM2 = CacheShape((KVLayer(3, 64, 64),) * 30)
MIXED = CacheShape((KVLayer(2, 64, 64),) * 3, (Window(KVLayer(1, 32, 32), 512),) * 9, 100, 50, 2)


def room(
    hot_mib: int,
    shape: CacheShape = SMOLLM2,
    *,
    pays_for_work: bool = True,
    asked_for: bool = False,
) -> HotRoom:
    return HotRoom(shape, 4, hot_mib * MIB, 8192, pays_for_work, asked_for)


@pytest.mark.parametrize(
    ("hot_mib", "usable", "sessions"), [(48, 281, 0), (120, 1086, 1), (200, 1982, 2)]
)
def test_work_is_paid_out_of_the_budget_of_mlx(hot_mib, usable, sessions):
    found = room(hot_mib)
    assert found.longest_context() == usable
    assert found.sessions(1000) == sessions


@pytest.mark.parametrize("shape", [SMOLLM2, MIXED])
@pytest.mark.parametrize("hot_mib", [1, 30, 120, 4000])
def test_the_longest_context_is_the_engines(shape, hot_mib):
    expected = longest_context(shape.cost(4), hot_mib * MIB, 8192)
    assert room(hot_mib, shape).longest_context() == expected


def test_one_session_is_answered_and_the_others_idle():
    found = room(300)
    count = found.sessions(1000)
    held = (count - 1) * SMOLLM2.hot_bytes(1000, 4) + alone_bytes(SMOLLM2.cost(4), 1000)
    assert held <= 300 * MIB < held + SMOLLM2.hot_bytes(1000, 4)


def test_a_pool_that_holds_nothing_else_is_divided():
    found = room(120, pays_for_work=False)
    assert found.sessions(1000) == 120 * MIB // SMOLLM2.hot_bytes(1000, 4)
    assert found.longest_context() == 120 * MIB // SMOLLM2.hot_bytes(1, 4)
    assert found.refusal() == ""


def test_too_little_is_refused_with_what_is_enough():
    assert "a context of 64 tokens needs 29 MiB while it runs" in room(28).refusal()
    assert room(29).refusal() == ""
    assert room(29).longest_context() >= 64


def test_vllm_needs_room_for_the_context_that_was_asked_for():
    """It cuts the model's own context to its pool, but ends if it was given a number."""
    assert room(120, pays_for_work=False).refusal() == ""
    refusal = room(120, pays_for_work=False, asked_for=True).refusal()
    assert "one context of 8192 tokens takes 360 MiB" in refusal
    assert "lower engine.max_context" in refusal
    assert room(360, pays_for_work=False, asked_for=True).refusal() == ""
    assert "one context of 64 tokens takes 3 MiB" in room(2, pays_for_work=False).refusal()


def test_a_session_without_a_cache_divides_nothing_by_zero():
    assert room(1, CacheShape()).sessions(10) > 0
