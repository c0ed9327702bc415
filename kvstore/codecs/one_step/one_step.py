"""Calibrated presets that are entropy-coded: a closed loop over units, and one step for all.

The stages: un-RoPE, the model's mean, a gain of 1.5 dB steps for K and V of each layer, the loop of
``closed_loop``, rANS with static tables. The step is one of rows of unit size in the metric of the
errors. So a preset leaves the same weighted error in every model, and the bits follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvstore.codecs.entropy.class_coder import ClassCoder
from kvstore.codecs.entropy.tables import SymbolTables, fit_tables
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.one_step.closed_loop import ClosedLoop
from kvstore.codecs.one_step.fused_loop import fused_loop
from kvstore.codecs.one_step.loop_checks import ARRAYS, LEVELS, OF_GAINS, checked_integers
from kvstore.codecs.one_step.loop_learning import (
    PREPARING_TOKENS,
    SAMPLED_TOKENS,
    Centroids,
    StackLearner,
)
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.pipeline import Pipeline, StackPacker
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.codecs.stages.gain import LogGain
from kvstore.codecs.stages.model_transforms import ModelMean, UnRope
from kvstore.shapes import KVLayout

DEPTH, MOST_KNOWN = 2, 2048


@dataclass(frozen=True)
class OneStep:
    """Spends a step of ``step``, of rows of unit size.

    A unit is predicted from ``depth`` units before; but from no more channels than ``most_known``,
    the last ones.
    """

    scope: Scope
    step: float
    depth: int = DEPTH
    most_known: int = MOST_KNOWN

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        centroids = Centroids()
        # The levels of a class hardly depend on the scope; axes of one layer are quickly found.
        layers = replace(self, scope=Scope("layer"))
        for learner in layers._learners(samples, means, centroids.levels(), PREPARING_TOKENS):
            learner.centroids = centroids
            for _ in learner.codes():
                pass
        levels = centroids.levels()
        learners = self._learners(samples, means, levels, SAMPLED_TOKENS)
        learned = _learned_tables("", itertools.chain.from_iterable(x.codes() for x in learners))
        codes = itertools.chain.from_iterable(x.gain_codes() for x in learners)
        learned |= {LEVELS: levels, **_learned_tables("gain_", codes)}
        for number, learner in enumerate(learners):
            own = vars(learner.integers) | dict(zip(OF_GAINS, learner.gains(), strict=True))
            learned |= {f"{name}.{number}": own[name] for name in ARRAYS}
        return learned

    def _learners(
        self, samples: Samples, means: np.ndarray, levels: np.ndarray, num_tokens: int
    ) -> list[StackLearner]:
        learners = []
        for shape in stack_shapes(self.scope, samples.layout):
            reach = min(min(self.depth, shape.num_units - 1) * shape.width, self.most_known)
            known = (samples, shape, means, self.step, reach, levels, num_tokens)
            learners.append(StackLearner(*known))
        return learners

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[StackPacker, ...]:
        tables, gain_tables = _tables(learned, ""), _tables(learned, "gain_")
        parts = []
        for number, shape in enumerate(stack_shapes(self.scope, layout)):
            arrays = {name: learned[f"{name}.{number}"] for name in ARRAYS}
            integers = checked_integers(shape, arrays | {LEVELS: learned[LEVELS]})
            centres, classes = (arrays[name] for name in OF_GAINS)
            pipeline = Pipeline(
                shape,
                (UnRope(shape, profile.ropes), ModelMean(shape, learned["means"])),
                LogGain(shape, centres, ClassCoder(classes, gain_tables)),
                (),
                ClosedLoop(integers),
                ClassCoder(integers.classes, tables),
            )
            parts.append(fused_loop(pipeline, integers, profile, learned["means"]))
        return tuple(parts)


def _learned_tables(
    prefix: str, codes: Iterable[tuple[np.ndarray, np.ndarray]]
) -> dict[str, np.ndarray]:
    tables = fit_tables(codes)
    return {f"{prefix}frequencies": tables.frequencies, f"{prefix}largest": tables.largest}


def _tables(learned: Mapping[str, np.ndarray], prefix: str) -> SymbolTables:
    """Returns copies of tables: kernels refuse read-only arrays, such as those of a file."""
    frequencies = np.array(learned[f"{prefix}frequencies"], np.uint16)
    return SymbolTables(frequencies, np.array(learned[f"{prefix}largest"]))


BALANCED = OneStep(Scope("layer"), 0.325)
MAX = OneStep(Scope("group", 10), 0.5, most_known=768)
SAFE = OneStep(Scope("layer"), 0.028)
