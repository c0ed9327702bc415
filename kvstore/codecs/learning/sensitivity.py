"""How much errors in stored KV matter, from gradients of what the model says later.

Only later tokens count: in cold storage the prefix is computed already, and what its own tokens
would have said is of no interest. Backpropagation through a whole prefill puts weight on the first
layers' values that no later token gives them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.learning.statistics import element_means, unit_rows
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.codecs.stages.gain import root_mean_squares
from kvstore.codecs.stages.un_rope import UnRope
from kvstore.shapes import KVRun

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
        for shape, total in zip(shapes, totals, strict=True):
            relative = _relative(samples, shape, means, text, gradient)
            for start, products in zip(shape.starts, total, strict=True):
                columns = relative[:, :, start : start + products.shape[1]]
                products += np.matmul(columns.swapaxes(1, 2), columns)
        num_tokens += relative.shape[1]
    return _by_head(samples, shapes, totals, max(num_tokens, 1))


def _relative(
    samples: Samples, shape: StackShape, means: np.ndarray, text: KVRun, gradient: KVRun
) -> np.ndarray:
    """Returns gradients by errors in rows of unit size, keys without RoPE.

    They are fp32 (units, tokens, width).
    """
    stack = shape.gather(gradient, NUM_SINKS, "float32")
    turned, _ = UnRope(shape, samples.ropes).forward(stack, NUM_SINKS)
    one = Samples(samples.layout, samples.ropes, [text])
    ((_, gains),) = unit_rows(one, shape, means, lambda rows: root_mean_squares(rows, shape))
    relative: np.ndarray = turned * gains[:, : turned.shape[1]]
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
