"""The distance of a model with an unpacked past from the same model with the exact one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.shapes import NUMPY_DTYPES, KVLayout, KVRun


@dataclass(frozen=True)
class Drift:
    """The drift at every scored position of one case, so that cases of any length add up fairly."""

    kl: np.ndarray  # fp64 (num_positions,), nats
    same_top: np.ndarray  # bool (num_positions,): the most likely token is the same
    loss: np.ndarray  # fp64 (num_judged,), nats: how much less likely the text became
    delta_p: np.ndarray  # fp64 (num_judged,): probability of the text's token, packed less exact


def drift(exact: np.ndarray, packed: np.ndarray, tokens: Sequence[int]) -> Drift:
    """Compare log-probabilities after each token.

    ``exact`` and ``packed``: fp32 (len(tokens), vocabulary). The last position has no next token to
    judge by, so what goes by that token has one entry fewer.
    """
    return _drift(exact, packed, np.arange(len(tokens) - 1), np.asarray(tokens[1:]))


def answer_drift(
    exact: np.ndarray, packed: np.ndarray, tokens: Sequence[int], places: Sequence[int]
) -> Drift:
    """Compare the predictions of the tokens at ``places``, none of which is the first.

    ``exact`` and ``packed``: fp32 (len(tokens), vocabulary), after each token.
    """
    before = np.asarray(places) - 1
    following = np.asarray(tokens)[np.asarray(places)]
    return _drift(exact[before], packed[before], np.arange(len(before)), following)


def _drift(
    exact: np.ndarray, packed: np.ndarray, judged: np.ndarray, following: np.ndarray
) -> Drift:
    """``following``: int (num_judged,), the token that comes after each position of ``judged``."""
    kl = np.array([_kl(x, y) for x, y in zip(exact, packed, strict=True)], np.float64)
    before, after = (x[judged, following].astype(np.float64) for x in (exact, packed))
    return Drift(
        kl=np.maximum(kl, 0),
        same_top=exact.argmax(1) == packed.argmax(1),
        loss=before - after,
        delta_p=np.exp(after) - np.exp(before),
    )


def _kl(exact: np.ndarray, packed: np.ndarray) -> float:
    """KL of one position, nats; for all positions at once the temporaries would be too large."""
    return float(np.einsum("v,v->", np.exp(exact), exact - packed, dtype=np.float64))


def answers(log_probs: np.ndarray, tokens: Sequence[int], num_answer: int) -> bool:
    """True if greedy decoding would give the last ``num_answer`` of ``tokens``.

    ``log_probs``: fp32 (len(tokens), vocabulary), after each token.
    """
    first = len(tokens) - num_answer
    guesses = log_probs[first - 1 : -1].argmax(1)
    return bool(np.array_equal(guesses, tokens[first:]))


@dataclass(frozen=True)
class Loss:
    """The loss of all rows of K, or of V, that went through a codec."""

    cosine: float  # mean over rows
    error: float  # sum of squared errors over the sum of squares


def loss(exact: KVRun, packed: KVRun, layout: KVLayout, side: int) -> Loss:
    """The loss of K (``side`` 0) or V (1) of all layers."""
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
    """An array of the engine's dtype as fp32, in the same shape."""
    if layout.dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    assert array.dtype == NUMPY_DTYPES[layout.dtype]
    return array.astype(np.float32)
