"""Calibrated presets that are entropy-coded: a closed loop over units, and one step for all.

The stages: un-RoPE, the model's mean, a gain of 1.5 dB steps for K and V of each layer, the loop of
``closed_loop``, rANS with static tables. The step applies to rows of unit size, weighted by the
metric of the errors. So a preset leaves the same weighted error in every model, and the number of
bits depends on the model.

Learned arrays are checked when a profile is opened, since kernels use them unchecked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from kvstore.codecs.entropy.class_coder import DEAD, ClassCoder
from kvstore.codecs.entropy.tables import (
    FIRST_WIDE,
    MOST_NARROW,
    NUM_CLASSES,
    SymbolTables,
    fit_tables,
)
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.one_step.closed_loop import (
    BYTE,
    MOST_BITS,
    NUM_LEVELS,
    ClosedLoop,
    LoopIntegers,
)
from kvstore.codecs.one_step.fused_loop import fused_loop
from kvstore.codecs.one_step.loop_learning import (
    MOST_FINER,
    PREPARING_TOKENS,
    SAMPLED_TOKENS,
    Centroids,
    StackLearner,
    least_unit,
)
from kvstore.codecs.profile import (
    ArraySpecs,
    Profile,
    are_sizes,
    ascends,
    check_ranges,
    check_specs,
    length_of,
)
from kvstore.codecs.stacks.pipeline import Pipeline, StackPacker
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.codecs.stages.gain import LogGain
from kvstore.codecs.stages.model_transforms import ModelMean, UnRope
from kvstore.shapes import KVLayout

DEPTH, MOST_KNOWN = 2, 2048
LEVELS: Final = "levels"  # the same for all stacks
OF_GAINS: Final = ("gain_centres", "gain_classes")
# The arrays of each stack.
ARRAYS: Final = (*(x.name for x in fields(LoopIntegers) if x.name != LEVELS), *OF_GAINS)
LARGEST_EXPONENT: Final = 20
_SPECS: Final[ArraySpecs] = {
    "known": ("i1", ("units", "reach", "width")),
    "up": ("u1", ("units", "width")),
    "wide": ("i2", ("units", "wide", "width")),
    "own": ("i1", ("units", "others", "width")),
    "finer": ("u1", ("units",)),
    "exponents": ("i1", ("units", "width")),
    "down": ("u1", ("units", "width")),
    "encode": ("i2", ("units", "components", "width")),
    "rates": ("f4", ("units", "components")),
    "rest": ("u1", ("units", "width")),
    "classes": ("u1", ("units", "components")),
    LEVELS: ("i2", ("classes", "levels")),
    "gain_centres": ("i2", ("units", "parts")),
    "gain_classes": ("u1", ("units", "parts")),
}


@dataclass(frozen=True)
class OneStep:
    """A preset with one quantisation step, ``step``, for rows of unit size.

    A unit is predicted from the ``depth`` units before it, or from their last ``most_known``
    channels if they have more.
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
    """Return copies of tables: kernels refuse read-only arrays, such as those of a file."""
    frequencies = np.array(learned[f"{prefix}frequencies"], np.uint16)
    return SymbolTables(frequencies, np.array(learned[f"{prefix}largest"]))


def checked_integers(shape: StackShape, arrays: Mapping[str, np.ndarray]) -> LoopIntegers:
    """Return the integers of one stack.

    ``arrays``: those of ``ARRAYS`` and the levels. Raises ``ValueError`` for arrays that cannot
    have been learned.
    """
    sizes = {
        "units": shape.num_units,
        "width": shape.width,
        "parts": len(shape.gain_groups),
        "reach": length_of(arrays["known"], 1, 3),
        "wide": length_of(arrays["wide"], 1, 3),
        "others": length_of(arrays["own"], 1, 3),
        "components": length_of(arrays["classes"], 1, 2),
        "classes": NUM_CLASSES,
        "levels": NUM_LEVELS,
    }
    check_specs(arrays, _SPECS, sizes)
    if sizes["reach"] > shape.num_units * shape.width or sizes["components"] > shape.width:
        raise ValueError("integers of more channels than there are")
    integers = LoopIntegers(**{x.name: arrays[x.name] for x in fields(LoopIntegers)})
    check_ranges(_ranges(shape, arrays))
    if np.any(integers.counts > (sizes["wide"], sizes["others"])):
        raise ValueError("a component is coded that has no row of integers")
    return integers


def _ranges(shape: StackShape, arrays: Mapping[str, np.ndarray]) -> Mapping[str, bool]:
    exponents = arrays["exponents"].astype(np.int64)
    span = exponents.max(axis=1) - exponents.min(axis=1)
    least = np.log2(least_unit(shape.width))
    shifts = {
        name: int(arrays[name].max(initial=0)) <= MOST_BITS for name in ("up", "down", "rest")
    }
    return {
        **shifts,
        "finer": int(arrays["finer"].max()) <= MOST_FINER,
        "exponents": bool(
            exponents.min() >= least
            and exponents.max() <= LARGEST_EXPONENT
            and span.max() <= MOST_BITS
        ),
        "rates": are_sizes(arrays["rates"]),
        "classes": int(arrays["classes"].max(initial=DEAD)) < NUM_CLASSES
        and ascends(-arrays["classes"].astype(np.int64)),
        LEVELS: _are_levels(arrays[LEVELS].astype(np.int64)),
        "gain_classes": int(arrays["gain_classes"].max()) < NUM_CLASSES,
    }


def _are_levels(levels: np.ndarray) -> bool:
    """Return whether levels grow with codes, and whether bytes hold those of narrow classes."""
    per_step, added = levels[:, :1], levels[:, 1:]
    firsts = added + per_step * np.arange(1, NUM_LEVELS)
    largest = MOST_NARROW * per_step + np.maximum(added, 0).max(axis=1, keepdims=True)
    return bool(per_step.min() > 0 and firsts.min() >= 0 and largest[:FIRST_WIDE].max() <= BYTE)


BALANCED = OneStep(Scope("layer"), 0.325)
MAX = OneStep(Scope("group", 10), 0.5, most_known=768)
SAFE = OneStep(Scope("layer"), 0.028)
