"""Compares a model's answers after a restored prefix with those after the exact one.

``drift`` and ``row_loss`` compare one case; ``LossTally`` joins the cases of a preset at a context.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engines.calibration.gate.rules import QUIET
from engines.calibration.measuring.stopwatch import Speed
from kvstore.codecs.quality import Quality, TextQuality
from kvstore.shapes import NUMPY_DTYPES, KVLayout, KVRun
from kvstore.workers import processors

# In place of infinity and NaN, which JSON lacks; above every bound.
WORST = 1e9


class Drift(NamedTuple):
    """The differences at every scored position of a case; joined cases weigh by their length."""

    kl: Sequence[float]  # nats
    same_top: Sequence[bool]  # the most likely token is the same
    # Only for positions whose next token is known:
    loss: Sequence[float]  # nats, by which that token became less likely
    delta_p: Sequence[float]  # that token's probability, packed less exact


class RowLoss(NamedTuple):
    """The loss of the rows of a session that were packed and unpacked."""

    bits: float  # per value, packed
    cos_k: float  # mean cosine of rows
    cos_v: float
    error_k: float = 0.0  # sum of squared errors over the sum of squares
    error_v: float = 0.0


def drift(exact: np.ndarray, packed: np.ndarray, following: Sequence[int]) -> Drift:
    """Compare log-probabilities, fp32 (positions, vocabulary).

    ``following``: the tokens after the first positions; for the others, none is known.
    """
    kl = np.array([_kl(x, y) for x, y in zip(exact, packed, strict=True)], np.float64)
    judged = np.arange(len(following)), np.asarray(following, int)
    before, after = (x[judged].astype(np.float64) for x in (exact, packed))
    return Drift(
        kl=np.maximum(kl, 0).tolist(),
        same_top=(exact.argmax(1) == packed.argmax(1)).tolist(),
        loss=(before - after).tolist(),
        delta_p=(np.exp(after) - np.exp(before)).tolist(),
    )


def _kl(exact: np.ndarray, packed: np.ndarray) -> float:
    """Return the KL at one position, in nats; temporary arrays for all would be too large."""
    return float(np.einsum("v,v->", np.exp(exact), exact - packed, dtype=np.float64))


def answers(log_probs: np.ndarray, tokens: Sequence[int], num_answer: int) -> bool:
    """True if greedy decoding would give the last ``num_answer`` of ``tokens``.

    ``log_probs``: fp32 (len(tokens), vocabulary), after each token.
    """
    first = len(tokens) - num_answer
    guesses = log_probs[first - 1 : -1].argmax(1)
    return bool(np.array_equal(guesses, tokens[first:]))


def row_loss(exact: KVRun, packed: KVRun, layout: KVLayout, bits: float) -> RowLoss:
    """Return the loss of rows that a codec packed with ``bits`` per value."""
    if not exact:
        return RowLoss(bits, 1.0, 1.0)
    (cos_k, error_k), (cos_v, error_v) = (_side_loss(exact, packed, layout, x) for x in (0, 1))
    return RowLoss(bits, cos_k, cos_v, error_k, error_v)


def _side_loss(exact: KVRun, packed: KVRun, layout: KVLayout, side: int) -> tuple[float, float]:
    """Return the cosine and the error of K (``side`` 0) or V (1), over all layers."""
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
    """Return an array of the engine's dtype as fp32, in the same shape."""
    if layout.dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    assert array.dtype == NUMPY_DTYPES[layout.dtype]
    return array.astype(np.float32)


@dataclass
class LossTally:
    """Collects the figures of one codec at one context length, case by case."""

    preset: str
    codec_id: str
    context: int  # tokens
    texts: list[tuple[str, Drift]] = field(default_factory=list)  # with their names
    rows: list[RowLoss] = field(default_factory=list)  # of the texts
    needles: list[bool] = field(default_factory=list)  # found?
    chains: dict[str, list[Drift]] = field(default_factory=dict)  # at answers, by kind of problem
    prefills: list[Speed] = field(default_factory=list)
    restores: list[Speed] = field(default_factory=list)

    def quality(self) -> Quality:
        """Return the means over all cases so far.

        The perplexity is that of all texts joined: the exponential of the mean loss.
        """
        moved, solved = [x for _, x in self.texts], [*itertools.chain(*self.chains.values())]
        whole, at_answers = _joined(moved), _joined(solved)
        prefill, restore = _best(self.prefills), _best(self.restores)
        bits = _mean((x.bits for x in self.rows), WORST)
        error = _mean((y for x in self.rows for y in (x.error_k, x.error_v)), WORST)
        return Quality(
            preset=self.preset,
            codec_id=self.codec_id,
            context=self.context,
            bits_per_element=bits,
            perplexity_change_pct=_perplexity_change(whole),
            kl=_mean(whole.kl, WORST),
            top1=_mean(whole.same_top, 0),
            needle_found=sum(self.needles),
            needle_total=len(self.needles),
            cos_k=_mean((x.cos_k for x in self.rows), 0),
            cos_v=_mean((x.cos_v for x in self.rows), 0),
            error_k=_mean((x.error_k for x in self.rows), WORST),
            error_v=_mean((x.error_v for x in self.rows), WORST),
            gaussian_gap_db=gaussian_gap_db(bits, error) if error else None,
            texts=tuple(_of_text(name, x) for name, x in self.texts),
            delta_p=_root_mean_square(whole) if moved else None,
            chain_tokens=len(at_answers.kl),
            chain_kl=_mean(at_answers.kl, WORST) if solved else None,
            chain_top1=_mean(at_answers.same_top, 0) if solved else None,
            chain_delta_p=_root_mean_square(at_answers) if solved else None,
            chains=tuple(_of_text(kind, _joined(x)) for kind, x in self.chains.items()),
            prefill_s=prefill.seconds,
            restore_s=restore.seconds,
            waited=max(prefill.waited, restore.waited),
            timed_on=processors(),
        )


def _best(speeds: Sequence[Speed]) -> Speed:
    """Return the quickest undisturbed speed; if all were disturbed, the least disturbed."""
    quiet = [x for x in speeds if x.waited <= QUIET]
    return min(quiet) if quiet else min(speeds, key=lambda x: x.waited)


def gaussian_gap_db(bits: float, error: float) -> float:
    """Return how far an error lies above the least error of a white Gaussian source, in dB.

    ``error``: relative; ``bits``: per element.
    """
    return float(10 * np.log10(error) + 20 * np.log10(2) * bits)


def _joined(several: Sequence[Drift]) -> Drift:
    columns = zip(*several, strict=True) if several else [()] * len(Drift._fields)
    return Drift(*([*itertools.chain(*x)] for x in columns))


def _of_text(name: str, moved: Drift) -> TextQuality:
    return TextQuality(
        text=name,
        kl=_mean(moved.kl, WORST),
        perplexity_change_pct=_perplexity_change(moved),
        top1=_mean(moved.same_top, 0),
    )


def _root_mean_square(moved: Drift) -> float:
    return math.sqrt(_mean(np.square(moved.delta_p), 1))


def _perplexity_change(moved: Drift) -> float:
    loss = _mean(moved.loss, WORST)
    return 100 * math.expm1(loss) if loss < 100 else WORST


def _mean(values: Iterable[float], otherwise: float) -> float:
    """Return the mean; ``otherwise`` if there are no values or not all are finite."""
    found = np.array([*values], np.float64)
    mean = float(np.mean(found)) if found.size else math.nan
    return mean if math.isfinite(mean) else otherwise
