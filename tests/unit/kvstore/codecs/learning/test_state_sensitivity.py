"""The cost of errors in states, from gradients, and the levels at which it deals bits."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.catalogue import STATES
from kvstore.codecs.learning.sensitivity import FLOOR, StateSensitivities
from kvstore.codecs.states import DEALT, dealt_codec

HEADS, ROWS, WIDTH = 3, 8, 16
RNG = np.random.default_rng(5)
# Rows notice errors of very different sizes.
SLOPES = np.exp2(RNG.integers(-6, 6, (HEADS, ROWS, 1)))


def seen(seed: int, size: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """A state, and gradients of four draws by it."""
    rng = np.random.default_rng(seed)
    matrices = size * rng.standard_normal((1, HEADS, ROWS, WIDTH))
    drawn = rng.standard_normal((4, 1, HEADS, ROWS, WIDTH)) * SLOPES / size
    return matrices.astype(np.float32), drawn.astype(np.float32)


def learned(size: float = 1.0) -> dict[str, np.ndarray]:
    found = StateSensitivities()
    for seed in range(6):
        for number in (1, 0):
            found.add(number, *seen(10 * seed + number, size))
    return found.learned()


def test_rows_weigh_as_much_as_their_gradients() -> None:
    weights = learned()["weights0"].astype(np.float64)
    expected = (WIDTH * SLOPES**2).ravel()
    assert weights == pytest.approx(expected + FLOOR * expected.mean(), rel=0.35)


def test_the_size_of_a_state_does_not_count() -> None:
    small, large = learned(0.01), learned(100.0)
    for name, array in small.items():
        assert array == pytest.approx(large[name], rel=1e-3)


@pytest.mark.parametrize("name", DEALT)
def test_rows_have_as_many_bits_on_average_as_the_name_says(name: str) -> None:
    codec = dealt_codec(name, learned(), "ab")
    bits = []
    for seed in range(100, 130):  # states that nothing was learned of
        matrices, _ = seen(seed)
        payload = codec.encode(matrices, "float32")
        bits += [*payload[: HEADS * ROWS]]
    assert np.mean(bits) == pytest.approx(STATES[name].bits, abs=0.3)
    assert len({*bits}) > 3


def test_dealt_bits_lose_less_than_equal_ones() -> None:
    """The predicted loss, at the same bits: the purpose of dealing."""
    codec, equal = dealt_codec("dealt6", learned(), "ab"), dealt_codec("dealt6", None, "ab")
    costs = []
    for each in (codec, equal):
        total = 0.0
        for seed in range(100, 110):
            matrices, _ = seen(seed)
            found = each.decode(
                memoryview(each.encode(matrices, "float32")), "float32", matrices.shape
            )
            total += float((np.square(found - matrices) * SLOPES**2).sum())
        costs.append(total)
    assert costs[0] < 3 * costs[1], "six bits, dealt, cost little more than eight for all"


def test_nothing_is_known_of_a_state_that_was_seen_in_part() -> None:
    assert StateSensitivities().learned() == {}
    found = StateSensitivities()
    found.add(1, *seen(1))
    assert found.learned() == {}


def test_a_state_of_zeros_is_no_trouble() -> None:
    found = StateSensitivities()
    zeros = np.zeros((1, HEADS, ROWS, WIDTH), np.float32)
    found.add(0, zeros, np.zeros((2, *zeros.shape), np.float32))
    codec = dealt_codec("dealt4", found.learned(), "ab")
    assert not codec.decode(
        memoryview(codec.encode(zeros, "float32")), "float32", zeros.shape
    ).any()
