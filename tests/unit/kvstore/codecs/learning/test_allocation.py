from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.rows.lloyd_max import greedy_bits


def test_bits_go_where_the_error_shrinks_most():
    bits = greedy_bits(np.array([[64.0, 16.0], [1.0, 1e-9]]), 6)
    assert bits.sum() == 6 and bits.tolist()[0][0] >= bits.tolist()[0][1] >= bits.tolist()[1][0]
    assert bits[1, 1] == 0
    assert greedy_bits(np.ones(5), 15).tolist() == [3] * 5
    assert greedy_bits(np.ones(2), 16).tolist() == [8, 8]
    with pytest.raises(ValueError, match="bits"):
        greedy_bits(np.ones(2), 17)
