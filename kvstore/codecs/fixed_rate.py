"""Calibrated presets whose chunks all have one size: KLT, then so many bits for each component.

Un-RoPE, the model's mean, a gain of four bits for each row, the metric of each head, KLT of the
row, Lloyd-Max with the bits dealt out once and for all where they matter most, bit planes. All
behind the mean is in integers, so that every host gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.fixed_rate_axes import Axes
from kvstore.codecs.fused_rate import fused_rate
from kvstore.codecs.pieces.allocation import greedy_bits
from kvstore.codecs.pieces.integer_klt import IntegerKlt, IntegerLevels
from kvstore.codecs.pieces.mean import ModelMean
from kvstore.codecs.pieces.octave_gain import OctaveGain
from kvstore.codecs.pieces.planes import BitPlanes
from kvstore.codecs.pieces.rope import UnRope
from kvstore.codecs.pipeline import Pipeline, StackPart
from kvstore.codecs.profile import Profile
from kvstore.codecs.rate_integers import ARRAYS, RateIntegers
from kvstore.codecs.samples import Samples
from kvstore.codecs.stacks import Scope, StackShape, stack_shapes
from kvstore.shapes import KVLayout


@dataclass(frozen=True)
class FixedRate:
    """``bits`` per element on average, gains apart; ``most`` for any component."""

    scope: Scope
    bits: float
    most: int = 6

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        axes = [Axes.of(samples, x, means) for x in stack_shapes(self.scope, samples.layout)]
        variances = np.concatenate([x.variances.reshape(-1) for x in axes])
        bits = greedy_bits(variances, int(self.bits * len(variances)), self.most)
        ends = np.cumsum([x.variances.size for x in axes])[:-1]
        learned: dict[str, np.ndarray] = {}
        for number, (one, part) in enumerate(zip(axes, np.split(bits, ends), strict=True)):
            known = one.with_bits(part.reshape(one.variances.shape))
            learned |= {f"{name}.{number}": array for name, array in known.items()}
        return learned

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[StackPart, ...]:
        parts = []
        for number, shape in enumerate(stack_shapes(self.scope, layout)):
            known = {name: learned[f"{name}.{number}"] for name in ARRAYS}
            RateIntegers(shape, **known)  # or it says why not
            parts.append(_part(shape, profile, {**known, "means": learned["means"]}))
        return tuple(parts)


def _part(shape: StackShape, profile: Profile, known: Mapping[str, np.ndarray]) -> StackPart:
    gain = OctaveGain(shape, known["gain_steps"])
    levels = IntegerLevels(*(known[x] for x in ("bits", "bounds", "levels", "units", "rates")))
    pieces = Pipeline(
        shape,
        (UnRope(shape, profile.ropes), ModelMean(shape, known["means"])),
        gain,
        (IntegerKlt(known["encode"], known["decode"], known["scales"]),),
        levels,
        BitPlanes(known["bits"]),
        levels.fit,
    )
    return fused_rate(pieces, profile, known, gain)
