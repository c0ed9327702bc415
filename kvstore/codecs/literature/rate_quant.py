"""RateQuant: TurboQuant-MSE with bits allotted to heads, or to layers.

Idea: an error in one head costs the model more than in another; bits go where they help most.
Formula: reverse water-filling by how much an error in a head matters: its sensitivity, or its
energy if none was measured. The error for a number of bits is taken from the tables, so that no
slope has to be fitted.
Size: ``bits`` + 16 / D bits on average, at least ``least`` for any head: with one bit for half of
the value heads, as water-filling chooses at 2.5 bits, the loss was twice as high.
Paper: RateQuant, arXiv 2605.06675.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.literature.stages.levels import LloydMax, SignHadamard
from kvstore.codecs.profile import Profile
from kvstore.codecs.rows.lloyd_max import greedy_bits
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.codecs.stages.gain import HalfGain
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.shapes import KVLayout

HEAD = Scope("head")
MOST_BITS = 8


@dataclass(frozen=True)
class RateQuant:
    """Allots ``bits`` per value on average, ``least`` or more to each head.

    ``by_layer=1``: all keys of a layer get the same bits, and so do all its values.
    """

    bits: float = 2.5
    least: int = 2
    by_layer: int = 0

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        shapes = stack_shapes(HEAD, samples.layout)
        matters = np.concatenate([_importances(samples, x) for x in shapes])
        group_of = np.arange(len(matters))
        if self.by_layer:
            arrays = [unit[0].array for shape in shapes for unit in shape.units]
            group_of = np.unique(arrays, return_inverse=True)[1]
        importances = np.bincount(group_of, matters) / np.bincount(group_of)
        least = min(self.least, int(self.bits))
        spare = round((self.bits - least) * len(importances))
        dealt = (least + greedy_bits(importances, spare, most=MOST_BITS - least))[group_of]
        parts = np.split(dealt, np.cumsum([x.num_units for x in shapes])[:-1])
        return {f"bits.{number}": part.astype("|u1") for number, part in enumerate(parts)}

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[Pipeline, ...]:
        pipelines = []
        for number, shape in enumerate(stack_shapes(HEAD, layout)):
            of_unit = learned[f"bits.{number}"].astype(np.int64)
            bits = np.repeat(of_unit[:, None], shape.width, axis=1)
            levels = LloydMax(1 << bits, np.ones(bits.shape, np.float32))
            rotation = SignHadamard(shape)
            pipelines.append(
                Pipeline(shape, (), HalfGain(shape), (rotation,), levels, BitPlanes(bits))
            )
        return tuple(pipelines)


RATEQUANT = RateQuant()


def _importances(samples: Samples, shape: StackShape) -> np.ndarray:
    """Return how much a squared error in each unit matters, fp64 (units,)."""
    if samples.metrics is not None:
        return samples.importances(shape)[:, 0]
    energies = [np.mean(samples.stack(shape, x) ** 2, axis=(1, 2)) for x in samples.texts]
    return np.mean(energies, axis=0)
