"""One-bit sketches: the signs of projections onto random directions (QJL, arXiv 2406.03482).

A sketch of ``k`` is sign(S k) with S normal. The mean of sqrt(pi / 2) / m |k| S^T sign(S k) over S
is ``k``, so products with a query are unbiased; single ones are far off.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.literature.stages.draws import normal_draws


def directions(width: int, num_signs: int) -> np.ndarray:
    """Returns S, fp32 (num_signs, width)."""
    return normal_draws("sketch", num_signs, width).astype(np.float32)


def sign_size(width: int, num_signs: int) -> np.float32:
    """Returns the length of one sign along its direction, for a row of root mean square one."""
    return np.float32(np.sqrt(np.pi / 2 * width) / num_signs)
