"""How much errors in stored KV matter, from gradients of what the model says later.

Only later tokens count: in cold storage the prefix is computed already, and what its own tokens
would have said is of no interest. Backpropagation through a whole prefill puts weight on the first
layers' values that no later token gives them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.learning.samples import PIECE_TOKENS, Samples
from kvstore.codecs.learning.statistics import SMALLEST_GAIN, element_means
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.codecs.stages.gain import root_mean_squares
from kvstore.codecs.stages.mean import ModelMean
from kvstore.codecs.stages.un_rope import UnRope
from kvstore.shapes import KVRun, slice_tokens

SIDE = Scope("side")  # errors are relative to the size of its rows


def head_metrics(samples: Samples, gradients: Iterable[KVRun]) -> list[np.ndarray]:
    """Returns the metrics of ``Samples.metrics``, one fp32 (dim, dim) for each head.

    ``gradients``: for each of the texts, in their order, fp32 arrays like its KV, or shorter ones
    for its first tokens: of the loss of tokens behind, which the model itself has drawn, by K and V
    as they are stored.
    """
    layout, means = samples.layout, element_means(samples)
    shapes = stack_shapes(SIDE, layout)
    totals = [
        [np.zeros((shape.num_units, s.dim, s.dim)) for s in shape.units[0]] for shape in shapes
    ]
    num_tokens = 0
    for text, gradient in zip(samples.texts, gradients, strict=True):
        seen = gradient[0][0].shape[1]
        for shape, total in zip(shapes, totals, strict=True):
            for first in range(NUM_SINKS, seen, PIECE_TOKENS):
                span = (first, min(first + PIECE_TOKENS, seen))
                _add(total, shape, _relative(samples, shape, means, (text, gradient), span))
        num_tokens += max(0, seen - NUM_SINKS)
    return _by_head(samples, shapes, totals, max(num_tokens, 1))


def _add(total: list[np.ndarray], shape: StackShape, relative: np.ndarray) -> None:
    for start, products in zip(shape.starts, total, strict=True):
        columns = relative[:, :, start : start + products.shape[1]]
        products += np.matmul(columns.swapaxes(1, 2), columns)


def _relative(
    samples: Samples,
    shape: StackShape,
    means: np.ndarray,
    pair: tuple[KVRun, KVRun],
    span: tuple[int, int],
) -> np.ndarray:
    """Returns gradients by errors in rows of unit size, keys without RoPE.

    They are fp32 (units, tokens, width). ``pair``: a text and its gradient. ``span``: the first
    token and the one behind the last.
    """
    text, gradient = pair
    stack = shape.gather(slice_tokens(gradient, 0, span[1]), span[0], "float32")
    turned, _ = UnRope(shape, samples.ropes).forward(stack, span[0])
    rows, _ = ModelMean(shape, means).forward(samples.stack(shape, text, *span), 0)
    relative: np.ndarray = turned * np.maximum(root_mean_squares(rows, shape), SMALLEST_GAIN)
    return relative


def _by_head(
    samples: Samples,
    shapes: tuple[StackShape, ...],
    totals: list[list[np.ndarray]],
    num_tokens: int,
) -> list[np.ndarray]:
    found = {}
    for shape, total in zip(shapes, totals, strict=True):
        for number, unit in enumerate(shape.units):
            for vector, products in zip(unit, total, strict=True):
                metric = (products[number] / num_tokens).astype(np.float32)
                found[vector.array, vector.head] = metric
    return [found[key] for key in sorted(found)]
