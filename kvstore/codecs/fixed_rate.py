"""Calibrated presets whose chunks all have one size: KLT, then so many bits for each component.

Un-RoPE, the model's mean, a fitted fp16 gain for each row, KLT of the row, Lloyd-Max with the bits
dealt out once and for all where they matter most, bit planes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.pieces.allocation import greedy_bits
from kvstore.codecs.pieces.gain import HalfGain, root_mean_squares
from kvstore.codecs.pieces.klt import Klt
from kvstore.codecs.pieces.lloyd import LloydMax
from kvstore.codecs.pieces.mean import ModelMean
from kvstore.codecs.pieces.planes import BitPlanes
from kvstore.codecs.pieces.rope import UnRope
from kvstore.codecs.pipeline import Pipeline
from kvstore.codecs.profile import Profile
from kvstore.codecs.samples import Samples
from kvstore.codecs.stacks import Scope, stack_shapes
from kvstore.codecs.statistics import principal_axes, unit_rows
from kvstore.shapes import KVLayout


@dataclass(frozen=True)
class FixedRate:
    """``bits`` per element on average, gains apart; ``most`` for any component."""

    scope: Scope
    bits: float
    most: int = 6

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        learned: dict[str, np.ndarray] = {}
        importances = []
        for number, shape in enumerate(stack_shapes(self.scope, samples.layout)):
            sizes = functools.partial(root_mean_squares, shape=shape)
            rows = unit_rows(samples, shape, means, sizes)
            deviations, axes = principal_axes(stack for stack, _ in rows)
            weights = samples.weights(shape)[:, :1]
            learned[f"basis.{number}"] = axes.astype(np.float16)
            learned[f"deviations.{number}"] = deviations.astype(np.float32)
            importances.append((deviations * weights) ** 2)
        flat = np.concatenate([x.reshape(-1) for x in importances])
        bits, at = greedy_bits(flat, int(self.bits * len(flat)), self.most), 0
        for number, shape_like in enumerate(importances):
            part = bits[at : at + shape_like.size].reshape(shape_like.shape)
            learned[f"bits.{number}"] = part.astype(np.uint8)
            at += shape_like.size
        return learned

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
                    HalfGain(shape),
                    (Klt(learned[f"basis.{number}"]),),
                    LloydMax(1 << bits, learned[f"deviations.{number}"]),
                    BitPlanes(bits),
                )
            )
        return tuple(pipelines)
