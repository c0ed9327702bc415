from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.kv_budget import (
    BLOCK,
    HOT_CODECS,
    MOST_EXACT,
    NUM_RECENT,
    STEP,
    KVCost,
    batch_bytes,
    longest_context,
    packed_cost,
    passing_bytes,
)
from kvstore.shapes import KVLayer

COST = KVCost(per_token=1000, windows=((100, 512),), fixed=7, num_caches=4)


def test_a_row_is_charged_for_its_tokens_and_room_to_grow() -> None:
    assert COST.row_bytes(0) == 1000 * STEP + 100 * STEP + 7
    assert COST.row_bytes(1000) == 1000 * (1000 + STEP) + 100 * 512 + 7


def test_a_batch_is_charged_rows_times_longest() -> None:
    assert batch_bytes(COST, [(3, 1000), (0, 0), (1, 10)]) == (
        3 * COST.row_bytes(1000) + COST.row_bytes(10)
    )


def test_joining_costs_the_longest_row_and_a_layer_of_the_largest_batch() -> None:
    row = COST.row_bytes(1000)
    assert passing_bytes(COST, [(3, 1000), (1, 10), (0, 9999)]) == row + 3 * row // 4
    assert passing_bytes(COST, [(0, 0)]) == 0


@given(st.integers(0, 1 << 26), st.integers(1, 100_000))
def test_the_longest_context_fits_and_one_token_more_does_not(budget: int, at_most: int) -> None:
    def needed(num_tokens: int) -> int:
        alone = [(1, num_tokens)]
        return batch_bytes(COST, alone) + passing_bytes(COST, alone)

    longest = longest_context(COST, budget, at_most)
    assert longest == 0 or needed(longest) <= budget
    assert longest == at_most or needed(longest + 1) > budget


LAYERS = (KVLayer(3, 64, 64),) * 30


def test_a_long_session_takes_its_packed_rows_and_a_few_exact_ones():
    cost = packed_cost(LAYERS, 3, itemsize=4, prefill_step=512)
    row = 64 * 3 // 8 + 2
    elements = 30 * 2 * 3 * 64
    assert cost.per_token == 30 * 2 * 3 * row
    assert cost.idle_bytes(10_000) == 10_000 * cost.per_token + MOST_EXACT * elements * 2
    assert cost.row_bytes(10_000) == cost.idle_bytes(10_000 + STEP)


@pytest.mark.parametrize("num_tokens", [1, 4, 60, MOST_EXACT])
def test_a_short_session_takes_no_more_than_its_exact_rows_and_their_packed_ones(num_tokens):
    cost = packed_cost(LAYERS, 4, itemsize=2, prefill_step=512)
    exact = num_tokens * 30 * 2 * 3 * 64 * 2
    assert cost.idle_bytes(num_tokens) == exact + num_tokens * cost.per_token


def test_a_layer_is_unpacked_for_a_moment_and_a_part_of_a_prompt_stays_exact():
    cost = packed_cost(LAYERS, 3, itemsize=4, prefill_step=512)
    shapes = [(2, 1000), (0, 5000)]
    row = cost.row_bytes(1000)
    layer = 2 * 3 * 64 * 4
    assert passing_bytes(cost, shapes) == (
        row + 2 * row // 30 + 2 * 1000 * 2 * layer + 512 * 30 * 2 * 3 * 64 * 2
    )
    assert passing_bytes(cost, [(0, 0)]) == 0
    assert batch_bytes(cost, shapes) == 2 * row


def test_packed_rows_end_with_a_chunk_of_the_cold_store_or_before():
    """Else packed rows would rest unpacked in a session's tail, and be packed again."""
    assert set(HOT_CODECS) == {"tq3", "tq4"}
    for chunk_tokens in (32, 64, 128):
        for num_tokens in range(4 * chunk_tokens + 2 * BLOCK):
            packed_end = max(0, (num_tokens - NUM_RECENT) // BLOCK * BLOCK)
            assert packed_end <= num_tokens // chunk_tokens * chunk_tokens
