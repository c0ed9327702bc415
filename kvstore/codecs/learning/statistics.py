"""Means, covariances and principal axes of samples, a piece of a text at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.codecs.stages.mean import ModelMean

SMALLEST_GAIN = np.float32(2.0**-31)


# Maps rows, fp32 (units, tokens, width), to gains, fp32 (units, tokens, gain groups).
Sizes: TypeAlias = Callable[[np.ndarray], np.ndarray]


def element_means(samples: Samples) -> np.ndarray:
    """Returns the mean of each element of a token, fp32 (elements,), keys without RoPE."""
    total = np.zeros(samples.layout.elements_per_token)
    for shape in stack_shapes(Scope("side"), samples.layout):
        for stack in samples.stacks(shape):
            total[shape.elements] += stack.sum(axis=1, dtype=np.float64)
    return (total / max(samples.num_tokens, 1)).astype(np.float32)


def unit_rows(
    samples: Samples,
    shape: StackShape,
    means: np.ndarray,
    sizes: Sizes,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields all rows, piece by piece, without mean and of unit size, with their ``sizes``.

    Rows are fp32 (units, tokens, width), gains fp32 (units, tokens, gain groups). ``means``: fp32
    (elements of a token,).
    """
    centre = ModelMean(shape, means)
    for piece in samples.stacks(shape):
        stack, _ = centre.forward(piece, 0)
        gains = np.maximum(sizes(stack), SMALLEST_GAIN)
        for number, part in enumerate(shape.gain_groups):
            stack[:, :, part.start : part.stop] /= gains[:, :, number, None]
        yield stack, gains


def principal_axes(rows: Iterator[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Learns the principal axes of stacks, fp32 (units, tokens, width), text by text.

    Returns deviations (units, width), largest first, and their axes as columns (units, width,
    width), fp32. Raises ``ValueError`` if there is no text.
    """
    covariance: np.ndarray | None = None
    num_tokens = 0
    for stack in rows:
        products = np.matmul(stack.swapaxes(1, 2), stack)
        covariance = products if covariance is None else covariance + products
        num_tokens += stack.shape[1]
    if covariance is None:
        raise ValueError("nothing can be learned from no text")
    variances, axes = np.linalg.eigh(covariance / num_tokens)
    deviations = np.sqrt(np.maximum(variances[:, ::-1], 0))
    return deviations, np.ascontiguousarray(axes[:, :, ::-1])
