from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.kv_budget import (
    STEP,
    KVCost,
    batch_bytes,
    longest_context,
    passing_bytes,
)

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
