"""Methods of the literature that have to know the model, as calibrated presets.

Like ``seeds`` they are for comparison: a profile learns them only where ``fit_profile`` is asked
to. Sizes are in bits for each element of heads of ``D`` values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.pieces.additive import AdditiveVectors, learn_vectors
from kvstore.codecs.pieces.allocation import greedy_bits
from kvstore.codecs.pieces.gain import HalfGain, root_mean_squares
from kvstore.codecs.pieces.hadamard import SignHadamard
from kvstore.codecs.pieces.half_range import HalfRange
from kvstore.codecs.pieces.klt import Klt
from kvstore.codecs.pieces.lloyd import LloydMax
from kvstore.codecs.pieces.mean import ModelMean
from kvstore.codecs.pieces.min_max import MinMaxGroups, Rounded
from kvstore.codecs.pieces.planes import BitPlanes
from kvstore.codecs.pieces.rope import UnRope
from kvstore.codecs.pipeline import Pipeline
from kvstore.codecs.profile import Profile
from kvstore.codecs.samples import Samples
from kvstore.codecs.seeds import both_sides
from kvstore.codecs.stacks import Scope, StackShape, stack_shapes
from kvstore.codecs.statistics import principal_axes, unit_rows
from kvstore.shapes import KVLayout

HEAD = Scope("head")
Learned = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class SpectralQuant:
    """SpectralQuant (Dynamis-Labs): KLT of each head, ``signal`` bits for as many components as
    the variance effectively has, ``noise`` bits for the others; one table for each of both.

    noise + (signal - noise) * effective / D + 16 / D bits.
    """

    signal: int = 5
    noise: int = 2

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        learned: dict[str, np.ndarray] = {}
        for number, shape in enumerate(stack_shapes(HEAD, samples.layout)):
            sizes = functools.partial(root_mean_squares, shape=shape)
            rows = (stack for stack, _ in unit_rows(samples, shape, means, sizes))
            deviations, basis = principal_axes(rows)
            is_signal = np.arange(shape.width) < effective_dimensions(deviations**2)[:, None]
            learned[f"basis.{number}"] = basis.astype(np.float16)
            learned[f"deviations.{number}"] = _grouped_deviations(deviations, is_signal)
            learned[f"bits.{number}"] = np.where(is_signal, self.signal, self.noise).astype("|u1")
        return learned

    def assemble(
        self, profile: Profile, learned: Learned, layout: KVLayout
    ) -> tuple[Pipeline, ...]:
        pipelines = []
        for number, shape in enumerate(stack_shapes(HEAD, layout)):
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


@dataclass(frozen=True)
class RateQuant:
    """RateQuant (arXiv 2605.06675): TurboQuant-MSE with bits dealt out to heads.

    Reverse water-filling by how much an error in a head matters: its sensitivity, or its energy
    where none was measured. Errors by bits are those of the tables, so that no slope has to be
    fitted. ``bits`` + 16 / D bits on average, 1 at least for any head.
    """

    bits: float = 2.5

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        matters = [_importances(samples, x) for x in stack_shapes(HEAD, samples.layout)]
        joined = np.concatenate(matters)
        dealt = 1 + greedy_bits(joined, int((self.bits - 1) * len(joined)), most=7)
        parts = np.split(dealt, np.cumsum([len(x) for x in matters])[:-1])
        return {f"bits.{number}": part.astype("|u1") for number, part in enumerate(parts)}

    def assemble(
        self, profile: Profile, learned: Learned, layout: KVLayout
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


@dataclass(frozen=True)
class KVQuant:
    """After KVQuant (arXiv 2401.18079): keys before RoPE by channel, values by token.

    Its uneven levels and its list of outliers are left out. Keys 3 bits and groups of a whole
    chunk, values 3 bits and groups of 64: 3.375 bits.
    """

    bits: int = 3

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        return {}

    def assemble(
        self, profile: Profile, learned: Learned, layout: KVLayout
    ) -> tuple[Pipeline, ...]:
        def keys(shape: StackShape) -> Pipeline:
            return self._pipeline(shape, profile, MinMaxGroups(shape, self.bits, 128, "tokens"))

        def values(shape: StackShape) -> Pipeline:
            return self._pipeline(shape, profile, MinMaxGroups(shape, self.bits, 64, "width"))

        return both_sides(layout, keys, values)

    def _pipeline(self, shape: StackShape, profile: Profile, groups: MinMaxGroups) -> Pipeline:
        turn = UnRope(shape, profile.ropes)
        coder = BitPlanes(np.full((shape.num_units, shape.width), self.bits))
        return Pipeline(shape, (turn,), HalfRange(shape), (groups,), Rounded(self.bits), coder)


@dataclass(frozen=True)
class CommVQ:
    """After CommVQ (arXiv 2506.18879): each 8 neighbours as a sum of two learned vectors.

    2 + 16 / D bits. See ``pieces.additive`` for what is simpler than in the paper.
    """

    dim: int = 8
    stages: int = 2
    rounds: int = 8
    most_tokens: int = 2048

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        learned = {}
        for number, shape in enumerate(stack_shapes(HEAD, samples.layout)):
            sizes = functools.partial(root_mean_squares, shape=shape)
            texts = [stack for stack, _ in unit_rows(samples, shape, means, sizes)]
            rows = np.concatenate(texts, axis=1)
            rows = rows[:, :: -(-rows.shape[1] // self.most_tokens)]
            vectors = [learn_vectors(x, self.dim, self.stages, self.rounds) for x in rows]
            learned[f"vectors.{number}"] = np.stack(vectors).astype(np.float16)
        return learned

    def assemble(
        self, profile: Profile, learned: Learned, layout: KVLayout
    ) -> tuple[Pipeline, ...]:
        pipelines = []
        for number, shape in enumerate(stack_shapes(HEAD, layout)):
            vectors = learned[f"vectors.{number}"]
            units, pieces, stages = vectors.shape[:3]
            pipelines.append(
                Pipeline(
                    shape,
                    (UnRope(shape, profile.ropes), ModelMean(shape, learned["means"])),
                    HalfGain(shape),
                    (),
                    AdditiveVectors(vectors),
                    BitPlanes(np.full((units, pieces * stages), 8)),
                )
            )
        return tuple(pipelines)


LEARNED_SEEDS: dict[str, SpectralQuant | RateQuant | KVQuant | CommVQ] = {
    "spectral": SpectralQuant(),
    "ratequant": RateQuant(),
    "kvquant": KVQuant(),
    "commvq": CommVQ(),
}


def effective_dimensions(variances: np.ndarray) -> np.ndarray:
    """How many equal components would spread as much: (sum v)^2 / sum v^2 over the last axis."""
    spread: np.ndarray = variances.sum(axis=-1) ** 2 / np.sum(variances**2, axis=-1)
    whole: np.ndarray = np.ceil(spread)
    return whole


def _grouped_deviations(deviations: np.ndarray, is_signal: np.ndarray) -> np.ndarray:
    """The root mean square of each group, for all of its components."""
    grouped = np.zeros(deviations.shape)
    for group in (is_signal, ~is_signal):
        counts = np.maximum(group.sum(axis=1, keepdims=True), 1)
        grouped += group * np.sqrt((group * deviations**2).sum(axis=1, keepdims=True) / counts)
    narrow: np.ndarray = grouped.astype(np.float32)
    return narrow


def _importances(samples: Samples, shape: StackShape) -> np.ndarray:
    """fp64 (units,): squared."""
    if samples.metrics is not None:
        return samples.importances(shape)[:, 0]
    energies = [np.mean(samples.stack(shape, x) ** 2, axis=(1, 2)) for x in samples.texts]
    energy: np.ndarray = np.mean(energies, axis=0)
    return energy
