"""What was found of one preset at one context length, added up over its cases."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np

from engines.calibration.metrics import Drift


class TextQuality(msgspec.Struct, frozen=True, kw_only=True):
    """One text of a row, to see whether a kind of text suffers more than the others."""

    text: str
    kl: float
    perplexity_change_pct: float
    top1: float


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table: what a preset costs the model, and what it saves."""

    preset: str
    context: int  # tokens whose KV went through the codec
    bits_per_element: float  # everything counted: headers, scales, rows kept exact
    perplexity_change_pct: float
    kl: float  # nats, mean over all scored positions, from the exact cache to the unpacked one
    top1: float  # share of positions with the same most likely token
    needle_found: int
    needle_total: int  # of those the exact cache answers
    cos_k: float
    cos_v: float
    error_k: float  # squared, relative
    error_v: float
    texts: tuple[TextQuality, ...] = ()


@dataclass
class Tally:
    preset: str
    context: int
    bits: list[float] = field(default_factory=list)
    cos_k: list[float] = field(default_factory=list)
    cos_v: list[float] = field(default_factory=list)
    error_k: list[float] = field(default_factory=list)
    error_v: list[float] = field(default_factory=list)
    drifts: dict[str, Drift] = field(default_factory=dict)
    needles: list[bool] = field(default_factory=list)

    def quality(self) -> Quality:
        """Perplexity is that of all texts as one: the mean of the losses, then the exponential."""
        drifts = list(self.drifts.values())
        return Quality(
            preset=self.preset,
            context=self.context,
            bits_per_element=_mean(self.bits),
            perplexity_change_pct=_perplexity_change(drifts),
            kl=_mean(np.concatenate([x.kl for x in drifts])) if drifts else math.nan,
            top1=_mean(np.concatenate([x.same_top for x in drifts])) if drifts else math.nan,
            needle_found=sum(self.needles),
            needle_total=len(self.needles),
            cos_k=_mean(self.cos_k),
            cos_v=_mean(self.cos_v),
            error_k=_mean(self.error_k),
            error_v=_mean(self.error_v),
            texts=tuple(_of_text(name, x) for name, x in self.drifts.items()),
        )


def _of_text(name: str, drift: Drift) -> TextQuality:
    return TextQuality(
        text=name,
        kl=_mean(drift.kl),
        perplexity_change_pct=_perplexity_change([drift]),
        top1=_mean(drift.same_top),
    )


def _perplexity_change(drifts: list[Drift]) -> float:
    if not drifts:
        return math.nan
    return 100 * math.expm1(_mean(np.concatenate([x.loss for x in drifts])))


def _mean(values: list[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else math.nan
