"""KVQuant: keys before RoPE by channel, values by token.

Idea: before RoPE a channel of the keys has a size of its own, so it is grouped along tokens.
Formula: as in KIVI, groups of a whole chunk for keys and of 64 for values, 3 bits. The paper's
uneven levels and its list of outliers are left out.
Size: 3.375 bits.
Paper: KVQuant, arXiv 2401.18079.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.literature.stages.half_numbers import HalfRange
from kvstore.codecs.literature.stages.head_pipelines import head_pipelines
from kvstore.codecs.literature.stages.min_max import MinMaxGroups, Rounded
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.model_transforms import UnRope
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.shapes import KVLayout


@dataclass(frozen=True)
class KVQuant:
    """Learns nothing; uses the RoPE of the keys, which every profile has."""

    bits: int = 3

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        return {}

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[Pipeline, ...]:
        def keys(shape: StackShape) -> Pipeline:
            return self._pipeline(shape, profile, MinMaxGroups(shape, self.bits, 128, "tokens"))

        def values(shape: StackShape) -> Pipeline:
            return self._pipeline(shape, profile, MinMaxGroups(shape, self.bits, 64, "width"))

        return head_pipelines(layout, keys, values)

    def _pipeline(self, shape: StackShape, profile: Profile, groups: MinMaxGroups) -> Pipeline:
        turn = UnRope(shape, profile.ropes)
        coder = BitPlanes(np.full((shape.num_units, shape.width), self.bits))
        return Pipeline(shape, (turn,), HalfRange(shape), (groups,), Rounded(self.bits), coder)


KVQUANT = KVQuant()
