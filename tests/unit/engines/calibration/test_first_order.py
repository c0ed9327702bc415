"""The order for a model that was never measured."""

from __future__ import annotations

import pytest

from engines.calibration.first_order import FIRST_CONTEXT, TooShort, first_order
from kvstore.config import StoreConfig


@pytest.mark.parametrize(
    ("longest", "least", "context"),
    [
        (8192, 0, FIRST_CONTEXT),
        (8192, 5 * 784, 5 * 784),  # a state that can sleep every 784 tokens only
        (2048, 5 * 784, 1920),
        (400, 0, 256),
    ],
)
def test_how_long_its_prompts_are(longest: int, least: int, context: int) -> None:
    order = first_order(StoreConfig(), longest, "", least)
    assert order.contexts == (context,)
    assert order.window_tokens == min(context, FIRST_CONTEXT), "to learn from"


def test_an_engine_that_takes_next_to_nothing() -> None:
    with pytest.raises(TooShort, match="no more than 200 tokens"):
        first_order(StoreConfig(), 200, "")
