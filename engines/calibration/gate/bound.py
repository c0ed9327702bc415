"""The bound that a lossy codec must keep to serve a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvstore.codecs.quality import Quality


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The largest loss that is accepted.

    KL decides: the perplexity of single texts varies by more than codecs change it. The default
    admits three fixed bits with a profile, with a margin.
    """

    kl: Annotated[float, msgspec.Meta(ge=0)] = 0.01
    # Against disasters that KL, a mean, could hide.
    top1: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.9


def refusal(rows: Sequence[Quality], preset: str, bound: Bound) -> str:
    """The reason, in one sentence, why this preset must not serve this model; "" if it may."""
    measured = [row for row in rows if row.preset == preset]
    if not measured:
        return f"codec {preset} was not measured on this model; run: thermocline calibrate"
    for row in measured:
        at = f"codec {preset} at {row.context} tokens"
        if not row.kl <= bound.kl:
            return f"{at} has a KL of {row.kl:.4f}, above the bound of {bound.kl:g}"
        if not row.top1 >= bound.top1:
            return f"{at} keeps {row.top1:.1%} of the most likely tokens, under {bound.top1:.0%}"
        if row.needle_found < row.needle_total:
            return f"{at} lost {row.needle_total - row.needle_found} of {row.needle_total} needles"
    return ""
