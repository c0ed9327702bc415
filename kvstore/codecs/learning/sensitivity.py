"""Measures how much errors in stored KV matter, from derivatives of later tokens' attention.

Only later tokens count: in cold storage the prefix is already computed, and the outputs of its own
tokens are not needed again.

Each layer is measured by itself. The addition of its attention to the residual stream at the last
tokens of a text, divided by the size of the stream, is differentiated in random directions by the K
and V of the tokens before (``attention``). The mean outer product of these gradients says to which
errors the layer is sensitive.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.learning.samples import PIECE_TOKENS, Samples
from kvstore.codecs.learning.statistics import SMALLEST_GAIN, element_means
from kvstore.codecs.rope import Rope
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.codecs.stages.gain import root_mean_squares
from kvstore.codecs.stages.mean import ModelMean
from kvstore.codecs.stages.un_rope import UnRope
from kvstore.shapes import KVLayout, KVPair, slice_tokens

SIDE = Scope("side")  # errors are relative to the size of a side's rows


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
        """Adds the gradients of a layer by the first rows of a text.

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
        """Adds gradients by relative errors, fp32 (units, tokens, width)."""
        for number, unit in enumerate(shape.units):
            for start, vector in zip(shape.starts, unit, strict=True):
                columns = relative[number, :, start : start + vector.dim]
                self._sums[layer][vector.side][vector.head] += columns.T @ columns

    def metrics(self) -> list[np.ndarray] | None:
        """Returns the metrics of ``Samples.metrics``; None if a layer has no gradients yet."""
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
    """Returns the sizes to which errors are relative, fp32 (units, tokens, 1)."""
    (text,) = samples.texts
    rows, _ = ModelMean(shape, means).forward(samples.stack(shape, text, first, last), 0)
    sizes: np.ndarray = np.maximum(root_mean_squares(rows, shape), SMALLEST_GAIN)
    return sizes
