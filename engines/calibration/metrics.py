"""How far a model with an unpacked past is from the same model with the exact one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.shapes import NUMPY_DTYPES, KVLayout, KVRun


@dataclass(frozen=True)
class Drift:
    """Of all scored positions of one case. Lists, so that cases of any length add up fairly."""

    kl: np.ndarray  # fp64, nats, of each position
    same_top: np.ndarray  # bool
    loss: np.ndarray  # fp64, nats: how much less likely the text itself became


def drift(exact: np.ndarray, packed: np.ndarray, tokens: Sequence[int]) -> Drift:
    """``exact`` and ``packed``: log-probabilities (len(tokens), vocabulary) after each token.

    The last position has no next token to be judged by, so the loss has one entry fewer.
    """
    probs = np.exp(exact, dtype=np.float32)
    kl = np.einsum("nv,nv->n", probs, exact - packed, dtype=np.float64)
    following = np.asarray(tokens[1:])[:, None]
    loss = [
        np.take_along_axis(x[:-1], following, 1)[:, 0].astype(np.float64) for x in (exact, packed)
    ]
    return Drift(np.maximum(kl, 0), exact.argmax(1) == packed.argmax(1), loss[0] - loss[1])


def answers(log_probs: np.ndarray, tokens: Sequence[int], num_answer: int) -> bool:
    """True if greedy decoding would give the last ``num_answer`` of ``tokens``."""
    first = len(tokens) - num_answer
    guesses = log_probs[first - 1 : -1].argmax(1)
    return bool(np.array_equal(guesses, tokens[first:]))


@dataclass(frozen=True)
class Loss:
    """Of all rows of K, or of V, that went through a codec."""

    cosine: float  # mean over rows
    error: float  # squared, over the squares themselves


def loss(exact: KVRun, packed: KVRun, layout: KVLayout, side: int) -> Loss:
    """Of K (``side`` 0) or V (1)."""
    cosines, error, energy = [], 0.0, 0.0
    for a, b in zip(exact, packed, strict=True):
        x, y = widened(a[side], layout), widened(b[side], layout)
        squares = np.einsum("htd,htd->ht", x, x)
        lengths = np.sqrt(squares * np.einsum("htd,htd->ht", y, y))
        dots = np.einsum("htd,htd->ht", x, y)
        cosines.append(np.divide(dots, lengths, out=np.ones_like(dots), where=lengths > 0))
        missed = x - y
        error += float(np.einsum("htd,htd->", missed, missed, dtype=np.float64))
        energy += float(squares.sum(dtype=np.float64))
    return Loss(float(np.mean(cosines)), error / energy if energy else 0.0)


def widened(array: np.ndarray, layout: KVLayout) -> np.ndarray:
    """fp32, of an array as the engine has it."""
    if layout.dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    assert array.dtype == NUMPY_DTYPES[layout.dtype]
    return array.astype(np.float32)
