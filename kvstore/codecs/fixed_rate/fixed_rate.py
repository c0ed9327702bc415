"""Calibrated presets whose chunks all have one size: KLT, then fixed bits for each component.

The stages: un-RoPE, the model's mean, a gain of four bits for each row, the metric of each head,
KLT of the row, Lloyd-Max with bits that calibration allots to the components where they matter
most, bit planes. Everything after the mean is in integers, so that every host gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.fixed_rate.axes import Axes
from kvstore.codecs.fixed_rate.fused_rate import fused_rate
from kvstore.codecs.fixed_rate.rate_integers import ARRAYS, RateIntegers
from kvstore.codecs.fixed_rate.rate_pipeline import RatePipeline
from kvstore.codecs.learning.allocation import greedy_bits
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.pipeline import StackPacker
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.codecs.stages.integer_klt import IntegerKlt, IntegerLevels
from kvstore.codecs.stages.mean import ModelMean
from kvstore.codecs.stages.octave_gain import OctaveGain
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.codecs.stages.un_rope import UnRope
from kvstore.shapes import KVLayout


@dataclass(frozen=True)
class FixedRate:
    """Spends ``bits`` per element on average without gains, at most ``most`` on a component."""

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
    ) -> tuple[StackPacker, ...]:
        parts = []
        for number, shape in enumerate(stack_shapes(self.scope, layout)):
            known = {name: learned[f"{name}.{number}"] for name in ARRAYS}
            integers = RateIntegers(shape, **known)  # raises ValueError unless they fit
            parts.append(_part(integers, profile, {**known, "means": learned["means"]}))
        return tuple(parts)


def _part(integers: RateIntegers, profile: Profile, known: Mapping[str, np.ndarray]) -> StackPacker:
    shape = integers.shape
    gain = OctaveGain(shape, known["gain_steps"])
    levels = IntegerLevels(*(known[x] for x in ("bits", "bounds", "levels", "units", "rates")))
    pipeline = RatePipeline(
        shape=shape,
        before=(UnRope(shape, profile.ropes), ModelMean(shape, known["means"])),
        gain=gain,
        after=(IntegerKlt(known["encode"], known["decode"], known["scales"]),),
        quantiser=levels,
        coder=BitPlanes(known["bits"]),
        fit_gains=levels.fit_gains,
        integers=integers,
        means=known["means"],
        ropes=profile.ropes,
    )
    return fused_rate(pipeline, profile, known, gain)


DENSE3 = FixedRate(Scope("head"), 3.155)  # in all 3.25 bits per value for heads of 64 values
