from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.rows.lloyd_max import gauss_table, greedy_bits

# Part of the wire format: a change here makes every stored session unreadable.
LEVELS = {
    8: [0.24509418, 0.756005287, 1.34390926, 2.15194559],
    16: [
        *(0.128395036, 0.388048291, 0.656759143, 0.942340434),
        *(1.25623119, 1.6180464, 2.06901717, 2.73258948),
    ],
}
BOUNDS = {
    8: [0.500549734, 1.04995728, 1.74792755],
    16: [0.258221656, 0.522403717, 0.799549758, 1.09928584, 1.4371388, 1.84353185, 2.40080333],
}


@pytest.mark.parametrize("num_levels", [8, 16])
def test_tables_are_frozen(num_levels):
    table = gauss_table(num_levels)
    assert np.array_equal(table.level_array, np.array(LEVELS[num_levels], np.float32))
    assert np.array_equal(table.bound_array, np.array(BOUNDS[num_levels], np.float32))


@pytest.mark.parametrize(
    ("num_levels", "error"), [(2, 0.3634), (4, 0.1175), (8, 0.03455), (16, 0.0095)]
)
def test_mean_squared_error_is_that_of_the_literature(num_levels, error):
    table = gauss_table(num_levels)
    samples = np.abs(np.random.default_rng(1).standard_normal(400_000))
    chosen = table.level_array[np.searchsorted(table.bound_array, samples)]
    assert np.mean((samples - chosen) ** 2) == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("num_levels", [1, 2, 3, 11, 32, 255, 256])
def test_tables_of_any_number_of_levels(num_levels):
    table = gauss_table(num_levels)
    levels, bounds = table.all_levels(), table.all_bounds()
    assert (len(levels), len(bounds)) == (num_levels, num_levels - 1)
    assert np.array_equal(levels, -levels[::-1]) and np.all(np.diff(levels) > 0)
    assert np.allclose(bounds, (levels[1:] + levels[:-1]) / 2, atol=1e-6)
    with pytest.raises(ValueError, match="levels"):
        gauss_table(257)


def test_bits_go_where_the_error_shrinks_most():
    bits = greedy_bits(np.array([[64.0, 16.0], [1.0, 1e-9]]), 6)
    assert bits.sum() == 6 and bits.tolist()[0][0] >= bits.tolist()[0][1] >= bits.tolist()[1][0]
    assert bits[1, 1] == 0
    assert greedy_bits(np.ones(5), 15).tolist() == [3] * 5
    assert greedy_bits(np.ones(2), 16).tolist() == [8, 8]
    with pytest.raises(ValueError, match="bits"):
        greedy_bits(np.ones(2), 17)
