"""Calibrated presets whose chunks all have one size: KLT, then fixed bits for each component.

The stages: un-RoPE, the model's mean, a gain of four bits for each row, the metric of each head,
KLT of the row, Lloyd-Max with bits that calibration allots to the components where they matter
most, bit planes. Everything after the mean is in integers, so that every host gives the same bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvstore.codecs.fixed_rate.fused_rate import RatePipeline, fused_rate
from kvstore.codecs.fixed_rate.rate_integers import ARRAYS, RateIntegers, SizeCounts, integers_of
from kvstore.codecs.learning.samples import Samples, principal_axes, unit_rows
from kvstore.codecs.profile import Profile
from kvstore.codecs.rows.lloyd_max import greedy_bits
from kvstore.codecs.stacks.pipeline import StackPacker
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.codecs.stages.gain import CODES, STEPS, OctaveGain, root_mean_squares
from kvstore.codecs.stages.integer_klt import IntegerKlt, IntegerLevels
from kvstore.codecs.stages.model_transforms import HeadMetric, ModelMean, UnRope
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.shapes import KVLayout

BEYOND = STEPS // 2  # how many steps the highest usual gain lies above the largest observed size
FAR = (STEPS, 4 * STEPS)  # how many steps the last two gains lie above the highest usual gain
INNER = CODES - len(FAR)
LEVEL_TEXTS = 16  # texts from which levels are learned, evenly spaced among the samples' texts


@dataclass(frozen=True, eq=False)
class Axes:
    """The principal axes of rows divided by their gains, largest deviation first.

    ``means``: fp32 (elements of a token,), of keys without RoPE. ``variances``: fp32 (units,
    components): the weight of each component's errors. ``encode``, ``decode``: fp32 (units,
    components, width), to components and back to rows. ``deviations``: fp32 (units, components).
    """

    samples: Samples
    shape: StackShape
    means: np.ndarray
    gain: OctaveGain
    variances: np.ndarray
    encode: np.ndarray
    decode: np.ndarray
    deviations: np.ndarray

    @classmethod
    def of(cls, samples: Samples, shape: StackShape, means: np.ndarray) -> Axes:
        """Return the axes of the stack ``shape``, learned from samples.

        ``means``: fp32 (elements of a token,), of keys without RoPE.
        """
        metric = HeadMetric(shape, samples.roots(shape))
        octaves: list[np.ndarray] = []

        def weighted() -> Iterator[np.ndarray]:
            sizes = functools.partial(root_mean_squares, shape=shape)
            for stack, gains in unit_rows(samples, shape, means, sizes):
                octaves.append(np.log2(gains[:, :, 0]))
                yield metric.forward(stack, 0)[0]

        deviations, basis = principal_axes(weighted())
        seen = np.concatenate(octaves, axis=1)
        variances = deviations**2 * _shares(shape, seen)[:, None]
        rows = basis.swapaxes(1, 2)
        # The metric's roots are symmetric, so it may be applied to rows as if they were columns.
        there, back = metric.forward(rows, 0)[0], metric.backward(rows, 0, None)
        gain = OctaveGain(shape, gain_steps(seen))
        return cls(samples, shape, means, gain, variances, there, back, deviations)

    def with_bits(self, bits: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of a stack, by name, that ``FixedRate.assemble`` takes.

        ``bits``: integers (units, components), the bits of each component.
        """
        levels = self._counts(bits).levels()
        integers = integers_of(self.encode, self.decode, self.deviations, bits, levels)
        return integers | {"gain_steps": self.gain.steps.astype(np.int16)}

    def _counts(self, bits: np.ndarray) -> SizeCounts:
        counts = SizeCounts(bits)
        scaled = self.encode / np.maximum(self.deviations, 1e-30)[:, :, None]
        columns = scaled.swapaxes(1, 2).astype(np.float32)
        texts, step = self.samples.texts, -(-len(self.samples.texts) // LEVEL_TEXTS)
        some = replace(self.samples, texts=list(itertools.islice(texts, 0, None, step)))
        for stack, _ in unit_rows(some, self.shape, self.means, self._coarse_sizes):
            counts.add(np.matmul(stack, columns))
        return counts

    def _coarse_sizes(self, stack: np.ndarray) -> np.ndarray:
        """Return gains rounded as a payload stores them; too large rows get the largest gain."""
        gains, _ = self.gain.measure(stack)
        return gains


def _shares(shape: StackShape, octaves: np.ndarray) -> np.ndarray:
    """Return the weight of each unit's errors, fp64 (units,).

    Metrics measure errors relative to a *side*, K or V of a layer. If the rows of a head are small
    compared with its neighbours' rows, equally large relative errors do proportionally less harm.
    ``octaves``: fp32 (units, tokens).
    """
    squares = np.exp2(2 * octaves.astype(np.float64))
    sides = [(unit[0].layer, unit[0].side) for unit in shape.units]
    shares = np.ones(len(sides))
    for side in set(sides):
        members = [number for number, other in enumerate(sides) if other == side]
        whole = np.maximum(squares[members].mean(axis=0), 1e-30)
        shares[members] = (squares[members] / whole).mean(axis=1)
    return shares


def gain_steps(octaves: np.ndarray) -> np.ndarray:
    """Choose the gains that the rows of each unit may have, from the observed sizes.

    Half of them lie where most sizes are. The other half is spread evenly over all observed sizes
    and a little above them: the few tokens to which attention gives most weight often have unusual
    rows, and with gains chosen for the majority only, KL was a seventh higher. The last two lie far
    above, for rows unlike any in calibration: these are quantised coarsely, but need not be stored
    unquantised, which would take five times as many bytes.

    ``octaves``: floats (units, tokens), logarithms of sizes. Returns int16 (units, CODES),
    ascending, in steps.
    """
    seen = STEPS * octaves.astype(np.float64)
    lowest, highest = seen.min(axis=1), seen.max(axis=1) + BEYOND
    evenly = np.linspace(lowest, highest, seen.shape[1], axis=1)
    places = np.linspace(0, 1, INNER)
    inner = np.quantile(np.concatenate([seen, evenly], axis=1), places, axis=1).T
    steps = np.concatenate([inner, highest[:, None] + FAR], axis=1)
    return np.clip(np.rint(steps), -32768, 32767).astype(np.int16)


@dataclass(frozen=True)
class FixedRate:
    """A preset of ``bits`` per element on average, without gains; at most ``most`` a component."""

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
            pipeline = _pipeline(integers, profile, learned["means"])
            parts.append(fused_rate(pipeline, profile.layout))
        return tuple(parts)


def _pipeline(integers: RateIntegers, profile: Profile, means: np.ndarray) -> RatePipeline:
    i, shape = integers, integers.shape
    levels = IntegerLevels(i.bits, i.bounds, i.levels, i.units, i.rates)
    return RatePipeline(
        shape=shape,
        before=(UnRope(shape, profile.ropes), ModelMean(shape, means)),
        gain=OctaveGain(shape, i.gain_steps),
        after=(IntegerKlt(i.encode, i.decode, i.scales),),
        quantiser=levels,
        coder=BitPlanes(i.bits),
        fit_gains=levels.fit_gains,
        integers=integers,
        means=means,
        ropes=profile.ropes,
    )


DENSE3 = FixedRate(Scope("head"), 3.155)  # in all 3.25 bits per value for heads of 64 values
