"""Measures how much errors in stored KV and states matter, from derivatives of later tokens.

Only later tokens count: in cold storage the prefix is already computed, and the outputs of its own
tokens are not needed again.

Each layer is measured by itself. The addition of its attention to the residual stream at the last
tokens of a text, divided by the size of the stream, is differentiated in random directions by the K
and V of the tokens before (``attention``). The mean outer product of these gradients says to which
errors the layer is sensitive.

In the same way the addition of a recurrent layer at the tokens after a state, y_t = F_t(S), divided
by the size of the stream at t, is differentiated by S in random directions x_t ~ N(0, 1):

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

from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.catalogue import STATES
from kvstore.codecs.learning.samples import PIECE_TOKENS, SMALLEST_GAIN, Samples, element_means
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.codecs.stages.gain import root_mean_squares
from kvstore.codecs.stages.model_transforms import ModelMean, UnRope
from kvstore.codecs.states import DEALT, FEWEST, MOST, dealt_bits, relative_peaks
from kvstore.shapes import KVLayout, KVPair, Rope, slice_tokens

SIDE = Scope("side")  # errors are relative to the size of a side's rows
# Times the mean weight of an array's rows: a row that no text needed may be needed by another text.
FLOOR: Final = 0.1
_STEPS: Final = 80  # of the bisection for a level


class Sensitivities:
    """The sums of gradients' outer products, layer by layer and text by text."""

    def __init__(self, layout: KVLayout, ropes: tuple[Rope | None, ...]) -> None:
        self._layout = layout
        self._ropes = ropes
        self._sums = [
            [np.zeros((x.num_kv_heads, dim, dim)) for dim in (x.head_dim, x.value_dim)]
            for x in layout.layers
        ]
        self._num_rows = [0] * len(layout.layers)

    def add(self, layer: int, rows: KVPair, gradients: KVPair) -> None:
        """Add the gradients of a layer by the first rows of a text.

        ``rows``: K and V of a whole text, as an engine holds them. ``gradients``: fp32 (draws, KV
        heads, tokens, dim) by the K and V of its first tokens, as they are stored.
        """
        layout = KVLayout(self._layout.dtype, (self._layout.layers[layer],))
        samples = Samples(layout, (self._ropes[layer],), [[rows]])
        means = element_means(samples)
        num_draws, seen = gradients[0].shape[0], gradients[0].shape[2]
        for shape in stack_shapes(SIDE, layout):
            for first in range(NUM_SINKS, seen, PIECE_TOKENS):
                last = min(first + PIECE_TOKENS, seen)
                sizes = _sizes(samples, shape, means, first, last)
                for draw in range(num_draws):
                    pair = (gradients[0][draw], gradients[1][draw])
                    stack = shape.gather(slice_tokens([pair], 0, last), first, "float32")
                    turned, _ = UnRope(shape, samples.ropes).forward(stack, first)
                    self._add(layer, shape, turned * sizes)
        self._num_rows[layer] += num_draws * max(0, seen - NUM_SINKS)

    def _add(self, layer: int, shape: StackShape, relative: np.ndarray) -> None:
        """Add gradients by relative errors, fp32 (units, tokens, width)."""
        for number, unit in enumerate(shape.units):
            for start, vector in zip(shape.starts, unit, strict=True):
                columns = relative[number, :, start : start + vector.dim]
                self._sums[layer][vector.side][vector.head] += columns.T @ columns

    def metrics(self) -> list[np.ndarray] | None:
        """Return the metrics of ``Samples.metrics``; None if a layer has no gradients yet."""
        if not all(self._num_rows):
            return None
        return [
            (head / count).astype(np.float32)
            for sides, count in zip(self._sums, self._num_rows, strict=True)
            for side in sides
            for head in side
        ]


def _sizes(
    samples: Samples, shape: StackShape, means: np.ndarray, first: int, last: int
) -> np.ndarray:
    """Return the sizes to which errors are relative, fp32 (units, tokens, 1)."""
    (text,) = samples.texts
    rows, _ = ModelMean(shape, means).forward(samples.stack(shape, text, first, last), 0)
    return np.maximum(root_mean_squares(rows, shape), SMALLEST_GAIN)


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
        """Return the arrays that ``states.dealt_codec`` takes; {} if an array has no gradients."""
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
