"""The distance of a model with an unpacked past from the same model with the exact one.

It is measured case by case, and collected for a preset at one context length. A case's result is
kept while others are still measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import numpy as np

from engines.calibration.measuring.cases import Case
from kvstore.codecs.learning.bounds import gaussian_gap_db
from kvstore.codecs.quality import Quality, TextQuality
from kvstore.shapes import NUMPY_DTYPES, KVLayout, KVRun

# JSON has no infinity and no NaN, and no bound admits this.
WORST = 1e9


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


class Positions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A ``Drift``, as it is kept."""

    kl: tuple[float, ...]
    same_top: tuple[bool, ...]
    loss: tuple[float, ...]
    delta_p: tuple[float, ...]

    @property
    def drift(self) -> Drift:
        return Drift(
            kl=np.array(self.kl),
            same_top=np.array(self.same_top, bool),
            loss=np.array(self.loss),
            delta_p=np.array(self.delta_p),
        )


def positions_of(drift: Drift) -> Positions:
    """The drift in the form in which it is kept."""
    return Positions(
        kl=tuple(drift.kl.tolist()),
        same_top=tuple(drift.same_top.tolist()),
        loss=tuple(drift.loss.tolist()),
        delta_p=tuple(drift.delta_p.tolist()),
    )


class CaseResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Figures of one codec in one case. Without a codec: not even the exact cache answers it."""

    case: str  # digest of its tokens
    text: str  # its name
    context: int  # tokens
    codec_id: str = ""
    found: bool | None = None  # of a needle: it was answered
    chains: dict[str, Positions] = {}  # of chains: at the answers, by kind of problem
    # For 1,000 tokens; None if it could not be timed.
    prefill_s: float | None = None
    restore_s: float | None = None
    # Of a text alone:
    moved: Positions | None = None
    bits: float = 0.0
    cos: tuple[float, float] = (0.0, 0.0)  # of K and V
    errors: tuple[float, float] = (0.0, 0.0)
    residual: float | None = None
    above_bound: float | None = None


def digest_of(case: Case) -> str:
    """The digest of a case's tokens, in hex."""
    tokens = np.array([*case.prefix, -1, *case.rest, -1, case.num_answer], "<i8")
    return blake2b(tokens.tobytes(), digest_size=12).hexdigest()


@dataclass
class Tally:
    """Results of one preset at one context length: an entry per case, ``drifts`` by its name."""

    preset: str
    codec_id: str
    context: int
    bits: list[float] = field(default_factory=list)
    cos_k: list[float] = field(default_factory=list)
    cos_v: list[float] = field(default_factory=list)
    error_k: list[float] = field(default_factory=list)
    error_v: list[float] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)
    above_bound: list[float] = field(default_factory=list)
    drifts: dict[str, Drift] = field(default_factory=dict)
    needles: list[bool] = field(default_factory=list)
    chains: dict[str, list[Drift]] = field(default_factory=dict)  # by kind of problem
    # For 1,000 tokens, of each case that could be timed.
    prefill_s: list[float] = field(default_factory=list)
    restore_s: list[float] = field(default_factory=list)

    def add(self, result: CaseResult) -> None:
        """Count the result of one case with this preset's codec."""
        self.prefill_s += [] if result.prefill_s is None else [result.prefill_s]
        self.restore_s += [] if result.restore_s is None else [result.restore_s]
        for kind, moved in result.chains.items():
            self.chains.setdefault(kind, []).append(moved.drift)
        if result.found is not None:
            self.needles.append(result.found)
        if result.moved is not None:
            self.drifts[result.text] = result.moved.drift
            self._add_sizes(result)

    def _add_sizes(self, result: CaseResult) -> None:
        self.bits.append(result.bits)
        for kept, value in zip((self.cos_k, self.cos_v), result.cos, strict=True):
            kept.append(value)
        for kept, value in zip((self.error_k, self.error_v), result.errors, strict=True):
            kept.append(value)
        if result.residual is not None:
            self.residual.append(result.residual)
        if result.above_bound is not None:
            self.above_bound.append(result.above_bound)

    def quality(self) -> Quality:
        """The means over all cases.

        Perplexity is that of all texts as one: the exponential of the mean loss.
        """
        drifts = list(self.drifts.values())
        chains = [x for found in self.chains.values() for x in found]
        return Quality(
            preset=self.preset,
            codec_id=self.codec_id,
            context=self.context,
            bits_per_element=_mean([np.array(self.bits)], WORST),
            perplexity_change_pct=_perplexity_change(drifts),
            kl=_mean([x.kl for x in drifts], WORST),
            top1=_mean([x.same_top for x in drifts], 0),
            needle_found=sum(self.needles),
            needle_total=len(self.needles),
            cos_k=_mean([np.array(self.cos_k)], 0),
            cos_v=_mean([np.array(self.cos_v)], 0),
            error_k=_mean([np.array(self.error_k)], WORST),
            error_v=_mean([np.array(self.error_v)], WORST),
            gaussian_gap_db=self._gaussian_gap_db(),
            residual_error=_mean([np.array(self.residual)], WORST) if self.residual else None,
            above_bound_bits=_mean([np.array(self.above_bound)], WORST)
            if self.above_bound
            else None,
            texts=tuple(_of_text(name, [x]) for name, x in self.drifts.items()),
            delta_p=_root_mean_square(drifts) if drifts else None,
            chain_tokens=sum(len(x.kl) for x in chains),
            chain_kl=_mean([x.kl for x in chains], WORST) if chains else None,
            chain_top1=_mean([x.same_top for x in chains], 0) if chains else None,
            chain_delta_p=_root_mean_square(chains) if chains else None,
            chains=tuple(_of_text(kind, found) for kind, found in self.chains.items()),
            # Others may have had the machine meanwhile: the quickest is the least disturbed.
            prefill_s=min(self.prefill_s, default=None),
            restore_s=min(self.restore_s, default=None),
        )

    def _gaussian_gap_db(self) -> float | None:
        error = _mean([np.array([*self.error_k, *self.error_v])], WORST)
        return gaussian_gap_db(_mean([np.array(self.bits)], WORST), error) if error else None


def _of_text(name: str, drifts: list[Drift]) -> TextQuality:
    return TextQuality(
        text=name,
        kl=_mean([x.kl for x in drifts], WORST),
        perplexity_change_pct=_perplexity_change(drifts),
        top1=_mean([x.same_top for x in drifts], 0),
    )


def _root_mean_square(drifts: list[Drift]) -> float:
    return math.sqrt(_mean([x.delta_p**2 for x in drifts], 1))


def _perplexity_change(drifts: list[Drift]) -> float:
    loss = _mean([x.loss for x in drifts], WORST)
    return 100 * math.expm1(loss) if loss < 100 else WORST


def _mean(parts: list[np.ndarray], otherwise: float) -> float:
    """The mean of all values; ``otherwise`` if there are none or not all are finite."""
    values = np.concatenate(parts) if parts else np.empty(0)
    mean = float(np.mean(values)) if values.size else math.nan
    return mean if math.isfinite(mean) else otherwise
