"""Estimates how long a restore takes, from recent ones, and says whether it is worth that."""

from __future__ import annotations

from typing import Final

import numpy as np

TRY_AGAIN: Final = 8  # restores that are declined in a row, before one is made all the same


class RestoreTimes:
    """A line through the sizes and seconds of recent restores.

    What it sums counts for less and less: a tenth less with every further restore.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, tokens, seconds, tokens squared, tokens * seconds
        self._num_declined = 0  # in a row

    def is_worth(self, num_tokens: int, computing_s: float) -> bool:
        """True if a restore is estimated to end before computing would. Any thread.

        Each eighth in a row is tried all the same: what is declined teaches nothing, and after one
        restore of a busy moment all would be.
        """
        if not 0 < computing_s < self.seconds(num_tokens):
            self._num_declined = 0
            return True
        self._num_declined += 1
        return not self._num_declined % TRY_AGAIN

    def took(self, num_tokens: int, seconds: float) -> None:
        """Learn from a restore."""
        n, s = float(num_tokens), seconds
        self._sums = 0.9 * self._sums + (1.0, n, s, n * n, n * s)

    def seconds(self, num_tokens: int) -> float:
        """Estimate a restore of so many tokens; 0 = none was measured. Any thread."""
        count, n, s, nn, ns = self._sums
        if not count:
            return 0.0
        spread = nn - n * n / count
        # Of one size alone it is not known which part grows: all of it.
        slope = max((ns - n * s / count) / spread, 0.0) if spread > nn / 1000 else s / n
        return float(max((s + slope * (num_tokens * count - n)) / count, 0.0))
