"""The gains that a unit's rows may have, from the sizes that were seen of it.

Half of them lie where most sizes are, half evenly over all sizes that were seen and a little above
them: the few tokens that attention leans on are often the ones with unusual rows, and with gains
for the many only, KL was a seventh higher. The last two lie far above, for rows unlike any that
was learned from: they get coarse, but need not be kept as they are, five times as large.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.pieces.octave_gain import CODES, STEPS

BEYOND = STEPS // 2  # steps above the largest size that was seen
FAR = (STEPS, 4 * STEPS)  # steps above that
INNER = CODES - len(FAR)


def gain_steps(octaves: np.ndarray) -> np.ndarray:
    """int16 (units, CODES), ascending. ``octaves``: (units, tokens), logarithms of sizes."""
    seen = STEPS * octaves.astype(np.float64)
    lowest, highest = seen.min(axis=1), seen.max(axis=1) + BEYOND
    evenly = np.linspace(lowest, highest, seen.shape[1], axis=1)
    places = np.linspace(0, 1, INNER)
    inner = np.quantile(np.concatenate([seen, evenly], axis=1), places, axis=1).T
    steps = np.concatenate([inner, highest[:, None] + FAR], axis=1)
    whole: np.ndarray = np.clip(np.rint(steps), -32768, 32767).astype(np.int16)
    return whole
