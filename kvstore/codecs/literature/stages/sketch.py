"""One-bit sketches: the signs of projections onto random directions (QJL, arXiv 2406.03482).

A sketch of ``k`` is sign(S k) with S normal. sqrt(pi / 2) / m |k| S^T sign(S k) has ``k`` as its
mean over S, so products with a query come out unbiased; single ones are far off.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.literature.stages.draws import normal_draws


def directions(width: int, num_signs: int) -> np.ndarray:
    """Returns S, fp32 (num_signs, width)."""
    return normal_draws("sketch", num_signs, width).astype(np.float32)


def sign_size(width: int, num_signs: int) -> np.float32:
    """Returns what one sign adds along its direction, for a row whose root mean square is one."""
    return np.float32(np.sqrt(np.pi / 2 * width) / num_signs)
