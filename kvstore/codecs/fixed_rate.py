"""Calibrated presets whose chunks all have one size: KLT, then so many bits for each component.

Un-RoPE, the model's mean, a fitted gain of one byte for each row, the metric of each head, KLT of
the row, Lloyd-Max with the bits dealt out once and for all where they matter most, bit planes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.pieces.allocation import greedy_bits
from kvstore.codecs.pieces.gain import FINE, byte_gain, root_mean_squares
from kvstore.codecs.pieces.klt import Klt
from kvstore.codecs.pieces.lloyd import LloydMax
from kvstore.codecs.pieces.mean import ModelMean
from kvstore.codecs.pieces.metric import HeadMetric
from kvstore.codecs.pieces.planes import BitPlanes
from kvstore.codecs.pieces.rope import UnRope
from kvstore.codecs.pipeline import Pipeline
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
        learned: dict[str, np.ndarray] = {}
        for number, shape in enumerate(shapes):
            found = _axes(samples, shape, means)
            learned |= {f"{name}.{number}": array for name, array in found.items()}
        sizes = [learned[f"deviations.{number}"] for number in range(len(shapes))]
        bits = greedy_bits(_joined(sizes) ** 2, self._total_bits(sizes), self.most)
        ends = np.cumsum([x.size for x in sizes])[:-1]
        for number, part in enumerate(np.split(bits, ends)):
            learned[f"bits.{number}"] = part.reshape(sizes[number].shape).astype(np.uint8)
        return learned

    def _total_bits(self, sizes: list[np.ndarray]) -> int:
        return int(self.bits * sum(x.size for x in sizes))

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[Pipeline, ...]:
        pipelines = []
        for number, shape in enumerate(stack_shapes(self.scope, layout)):
            bits = learned[f"bits.{number}"].astype(np.int64)
            pipelines.append(
                Pipeline(
                    shape,
                    (UnRope(shape, profile.ropes), ModelMean(shape, learned["means"])),
                    byte_gain(shape, learned[f"gain_centres.{number}"]),
                    (
                        HeadMetric(shape, learned[f"roots.{number}"]),
                        Klt(learned[f"basis.{number}"]),
                    ),
                    LloydMax(1 << bits, learned[f"deviations.{number}"]),
                    BitPlanes(bits),
                )
            )
        return tuple(pipelines)


def _axes(samples: Samples, shape: StackShape, means: np.ndarray) -> dict[str, np.ndarray]:
    """Of one stack: the metric's roots, basis, deviations, and the gains' middle."""
    sizes = functools.partial(root_mean_squares, shape=shape)
    roots, octaves = samples.roots(shape), []
    metric = HeadMetric(shape, roots)

    def weighted() -> Iterator[np.ndarray]:
        for stack, gains in unit_rows(samples, shape, means, sizes):
            octaves.append(np.log2(gains).mean(axis=1))
            yield metric.forward(stack, 0)[0]

    deviations, basis = principal_axes(weighted())
    return {
        "roots": roots,
        "basis": basis.astype(np.float16),
        "deviations": deviations.astype(np.float32),
        "gain_centres": np.rint(FINE * np.mean(octaves, axis=0)).astype(np.int16),
    }


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([x.reshape(-1) for x in arrays])
