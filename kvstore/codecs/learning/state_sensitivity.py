"""Measures how much errors in matrices of recurrent states matter, from a layer's own output.

As for stored KV (``sensitivity``), the addition of a layer to the residual stream at the tokens
after a state, y_t = F_t(S), divided by the size of the stream at t, is differentiated by the state
S in random directions x_t ~ N(0, 1):

    G = d/dS sum_t x_t . y_t / rms(stream at t),  E[G_ij^2] = sum_t |dy_t / dS_ij|^2 / rms_t^2

This is the diagonal of J' J (Hutchinson, 1990): the share of the stream by which an error in one
value moves it. Errors of one row of a matrix are independent and equally large, so a row's weight
is the sum over its values. Because of the operations after a state (a norm of each head's output,
gates), the size of an error *relative to its matrix* counts; so weights are multiplied by the
matrix's mean square. A layer reads its state linearly, so except for that norm the weight is the
same for large errors as for small ones.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstore.codecs.states.dealt import DEALT, FEWEST, MOST, dealt_bits, relative_peaks
from kvstore.codecs.states.ways import STATES

# Times the mean weight of an array's rows: a row that no text needed may be needed by another text.
FLOOR: Final = 0.1
_STEPS: Final = 80  # of the bisection for a level


class StateSensitivities:
    """The sums of squared gradients, row by row, and the peaks of rows."""

    def __init__(self) -> None:
        self._sums: dict[int, np.ndarray] = {}
        self._peaks: dict[int, list[np.ndarray]] = {}

    def add(self, number: int, matrices: np.ndarray, gradients: np.ndarray) -> None:
        """Add the gradients of a layer by one array of a state.

        Args:
            number: the number of the array in its state.
            matrices: fp32 (..., rows, width), the array.
            gradients: fp32 (draws, ..., rows, width), by the array.
        """
        num_rows, width = matrices.shape[-2:]
        values = matrices.reshape(-1, width)
        squares = np.square(gradients.astype(np.float64)).sum(-1).mean(0).reshape(-1, num_rows)
        sizes = np.square(values.astype(np.float64)).mean(1).reshape(-1, num_rows).mean(1)
        weights = (squares * sizes[:, None]).ravel()
        self._sums[number] = self._sums.get(number, 0.0) + weights
        self._peaks.setdefault(number, []).append(relative_peaks(values, num_rows))

    def learned(self) -> dict[str, np.ndarray]:
        """Return the arrays that ``dealt.dealt_codec`` takes; {} if an array has no gradients."""
        numbers = range(len(self._sums))
        if not self._sums or any(x not in self._sums for x in numbers):
            return {}
        weights = [self._sums[x] / len(self._peaks[x]) for x in numbers]
        weights = [x + FLOOR * x.mean() for x in weights]
        costs = np.concatenate([weights[x] * peaks for x in numbers for peaks in self._peaks[x]])
        levels = [_level(costs[costs > 0], STATES[name].bits) for name in DEALT]
        found = {f"weights{x}": w.astype(np.float32) for x, w in zip(numbers, weights, strict=True)}
        return {**found, "levels": np.array(levels, np.float32)}


def _level(costs: np.ndarray, bits: float) -> float:
    """Return the lowest level at which rows have no more than so many bits on average."""
    if not len(costs):
        return 0.0
    low, high = float(costs.min()) * 4.0 ** -(MOST + 1), float(costs.max())
    assert FEWEST <= bits <= MOST
    for _ in range(_STEPS):
        middle = float(np.sqrt(low * high))
        if dealt_bits(costs, middle).mean() > bits:
            low = middle
        else:
            high = middle
    return high
