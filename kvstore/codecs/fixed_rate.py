"""Calibrated presets whose chunks all have one size: KLT, then so many bits for each component.

Un-RoPE, the model's mean, a fitted gain of one byte for each row, the metric of each head, KLT of
the row, Lloyd-Max with the bits dealt out once and for all where they matter most, bit planes. All
behind the mean is in integers, so that every host gives the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.fused_rate import fused_rate
from kvstore.codecs.integer_design import INTEGERS, integers_of
from kvstore.codecs.pieces.allocation import greedy_bits
from kvstore.codecs.pieces.gain import root_mean_squares
from kvstore.codecs.pieces.integer_klt import IntegerKlt, IntegerLevels
from kvstore.codecs.pieces.mean import ModelMean
from kvstore.codecs.pieces.metric import HeadMetric
from kvstore.codecs.pieces.octave_gain import STEPS, OctaveGain
from kvstore.codecs.pieces.planes import BitPlanes
from kvstore.codecs.pieces.rope import UnRope
from kvstore.codecs.pipeline import Pipeline, StackPart
from kvstore.codecs.profile import Profile
from kvstore.codecs.samples import Samples
from kvstore.codecs.stacks import Scope, StackShape, stack_shapes
from kvstore.codecs.statistics import principal_axes, unit_rows
from kvstore.shapes import KVLayout


@dataclass(frozen=True)
class FixedRate:
    """``bits`` per element on average, gains apart; ``most`` for any component."""

    scope: Scope
    bits: float
    most: int = 6

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        shapes = stack_shapes(self.scope, samples.layout)
        found = [_axes(samples, shape, means) for shape in shapes]
        sizes = [importances for importances, _, _ in found]
        bits = greedy_bits(_joined(sizes) ** 2, self._total_bits(sizes), self.most)
        ends = np.cumsum([x.size for x in sizes])[:-1]
        learned: dict[str, np.ndarray] = {}
        for number, part in enumerate(np.split(bits, ends)):
            importances, axes, centres = found[number]
            integers = integers_of(*axes, part.reshape(importances.shape))
            learned |= {f"{name}.{number}": array for name, array in integers.items()}
            learned[f"gain_centres.{number}"] = centres
        return learned

    def _total_bits(self, sizes: list[np.ndarray]) -> int:
        return int(self.bits * sum(x.size for x in sizes))

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[StackPart, ...]:
        parts = []
        for number, shape in enumerate(stack_shapes(self.scope, layout)):
            known = {name: learned[f"{name}.{number}"] for name in (*INTEGERS, "gain_centres")}
            known["means"] = learned["means"]
            parts.append(_part(shape, profile, known))
        return tuple(parts)


def _part(shape: StackShape, profile: Profile, known: Mapping[str, np.ndarray]) -> StackPart:
    gain = OctaveGain(shape, known["gain_centres"])
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


def _axes(
    samples: Samples, shape: StackShape, means: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Of one stack: how much a component matters, its axes there and back, the gains' middle."""
    sizes = functools.partial(root_mean_squares, shape=shape)
    metric, octaves = HeadMetric(shape, samples.roots(shape)), []

    def weighted() -> Iterator[np.ndarray]:
        for stack, gains in unit_rows(samples, shape, means, sizes):
            octaves.append(np.log2(gains).mean(axis=1))
            yield metric.forward(stack, 0)[0]

    deviations, basis = principal_axes(weighted())
    rows = basis.swapaxes(1, 2)
    # The metric's roots are symmetric, so rows go through it as columns would.
    axes = (metric.forward(rows, 0)[0], metric.backward(rows, 0, None), deviations)
    centres = np.rint(STEPS * np.mean(octaves, axis=0)).astype(np.int16)
    return deviations.astype(np.float32), axes, centres


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([x.reshape(-1) for x in arrays])
