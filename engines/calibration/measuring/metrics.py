"""Compares a model's answers after a restored prefix with those after the exact one.

First case by case, then over all cases of a preset at one context length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.calibration.gate.rules import QUIET
from engines.calibration.measuring.stopwatch import Speed
from kvstore.codecs.quality import Quality, TextQuality
from kvstore.shapes import NUMPY_DTYPES, KVLayout, KVRun
from kvstore.workers import processors

# JSON has no infinity and no NaN, and no bound admits this.
WORST = 1e9


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The drift at every scored position of one case, so that cases of any length add up fairly."""

    kl: tuple[float, ...]  # nats
    same_top: tuple[bool, ...]  # the most likely token is the same
    # Of the positions with a next token to judge by:
    loss: tuple[float, ...]  # nats: how much less likely the text became
    delta_p: tuple[float, ...]  # probability of the text's token, packed less exact


def drift(exact: np.ndarray, packed: np.ndarray, following: Sequence[int]) -> Drift:
    """Compare log-probabilities, fp32 (positions, vocabulary).

    ``following``: the token after each of the first positions; the others have none to judge by.
    """
    kl = np.array([_kl(x, y) for x, y in zip(exact, packed, strict=True)], np.float64)
    judged = np.arange(len(following)), np.asarray(following, int)
    before, after = (x[judged].astype(np.float64) for x in (exact, packed))
    return Drift(
        kl=tuple(np.maximum(kl, 0).tolist()),
        same_top=tuple((exact.argmax(1) == packed.argmax(1)).tolist()),
        loss=tuple((before - after).tolist()),
        delta_p=tuple((np.exp(after) - np.exp(before)).tolist()),
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


def row_loss(exact: KVRun, packed: KVRun, layout: KVLayout, side: int) -> tuple[float, float]:
    """The loss of K (``side`` 0) or V (1) of all layers that went through a codec.

    Returns the mean cosine of rows, and the sum of squared errors over the sum of squares.
    """
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
    return float(np.mean(cosines)), error / energy if energy else 0.0


def widened(array: np.ndarray, layout: KVLayout) -> np.ndarray:
    """An array of the engine's dtype as fp32, in the same shape."""
    if layout.dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    assert array.dtype == NUMPY_DTYPES[layout.dtype]
    return array.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """Figures of one codec in one case."""

    text: str  # the case's name
    context: int  # tokens
    codec_id: str
    prefill: Speed | None  # None: it could not be timed
    restore: Speed
    found: bool | None = None  # of a needle: it was answered
    chains: dict[str, Drift] = field(default_factory=dict)  # at the answers, by kind of problem
    # Of a text alone:
    moved: Drift | None = None
    bits: float = 0.0
    cos: Sequence[float] = (0.0, 0.0)  # of K and of V, see ``row_loss``
    errors: Sequence[float] = (0.0, 0.0)


def quality_of(preset: str, results: Sequence[CaseResult]) -> Quality:
    """The means over all cases of one codec at one context length; there is one at least.

    Perplexity is that of all texts as one: the exponential of the mean loss.
    """
    texts = [x for x in results if x.moved is not None]
    drifts = [x.moved for x in texts if x.moved is not None]
    needles = [x.found for x in results if x.found is not None]
    chains: dict[str, list[Drift]] = {}  # by kind of problem
    for result in results:
        for kind, moved in result.chains.items():
            chains.setdefault(kind, []).append(moved)
    answers = [x for found in chains.values() for x in found]
    bits = _mean([[x.bits for x in texts]], WORST)
    error = _mean([x.errors for x in texts], WORST)
    return Quality(
        preset=preset,
        codec_id=results[0].codec_id,
        context=results[0].context,
        bits_per_element=bits,
        perplexity_change_pct=_perplexity_change(drifts),
        kl=_mean([x.kl for x in drifts], WORST),
        top1=_mean([x.same_top for x in drifts], 0),
        needle_found=sum(needles),
        needle_total=len(needles),
        cos_k=_mean([x.cos[:1] for x in texts], 0),
        cos_v=_mean([x.cos[1:] for x in texts], 0),
        error_k=_mean([x.errors[:1] for x in texts], WORST),
        error_v=_mean([x.errors[1:] for x in texts], WORST),
        gaussian_gap_db=gaussian_gap_db(bits, error) if error else None,
        texts=tuple(_of_text(x.text, [x.moved]) for x in texts if x.moved is not None),
        delta_p=_root_mean_square(drifts) if drifts else None,
        chain_tokens=sum(len(x.kl) for x in answers),
        chain_kl=_mean([x.kl for x in answers], WORST) if answers else None,
        chain_top1=_mean([x.same_top for x in answers], 0) if answers else None,
        chain_delta_p=_root_mean_square(answers) if answers else None,
        chains=tuple(_of_text(kind, found) for kind, found in chains.items()),
        **_times(results),
    )


def _times(results: Sequence[CaseResult]) -> dict[str, Any]:
    """The fields of a row that are times."""
    prefills = [x.prefill for x in results if x.prefill is not None]
    if not prefills:
        return {}
    prefill, restore = _best(prefills), _best([x.restore for x in results])
    return {
        "prefill_s": prefill.seconds,
        "restore_s": restore.seconds,
        "waited": max(prefill.waited, restore.waited),
        "timed_on": processors(),
    }


def _best(speeds: Sequence[Speed]) -> Speed:
    """The quickest of those that others hardly disturbed, else the least disturbed."""
    quiet = [x for x in speeds if x.waited <= QUIET]
    return min(quiet) if quiet else min(speeds, key=lambda x: x.waited)


def gaussian_gap_db(bits: float, error: float) -> float:
    """Return how far an error lies above the least error of a white Gaussian source, in dB.

    ``error``: relative; ``bits``: per element.
    """
    return float(10 * np.log10(error) + 20 * np.log10(2) * bits)


def _of_text(name: str, drifts: list[Drift]) -> TextQuality:
    return TextQuality(
        text=name,
        kl=_mean([x.kl for x in drifts], WORST),
        perplexity_change_pct=_perplexity_change(drifts),
        top1=_mean([x.same_top for x in drifts], 0),
    )


def _root_mean_square(drifts: list[Drift]) -> float:
    return math.sqrt(_mean([np.square(x.delta_p) for x in drifts], 1))


def _perplexity_change(drifts: list[Drift]) -> float:
    loss = _mean([x.loss for x in drifts], WORST)
    return 100 * math.expm1(loss) if loss < 100 else WORST


def _mean(parts: Sequence[npt.ArrayLike], otherwise: float) -> float:
    """The mean of all values; ``otherwise`` if there are none or not all are finite."""
    values = np.concatenate(parts) if parts else np.empty(0)
    mean = float(np.mean(values)) if values.size else math.nan
    return mean if math.isfinite(mean) else otherwise
