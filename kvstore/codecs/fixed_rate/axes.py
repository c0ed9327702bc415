"""The part of a fixed-rate preset that is learned of one stack: axes, gains, levels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvstore.codecs.fixed_rate.fitted_levels import SizeCounts
from kvstore.codecs.fixed_rate.integer_design import integers_of
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.learning.statistics import principal_axes, unit_rows
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import root_mean_squares
from kvstore.codecs.stages.metric import HeadMetric
from kvstore.codecs.stages.octave_gain import CODES, STEPS, OctaveGain

BEYOND = STEPS // 2  # steps above the largest size that was seen
FAR = (STEPS, 4 * STEPS)  # steps above that
INNER = CODES - len(FAR)
LEVEL_TEXTS = 16  # evenly chosen among the samples: levels need fewer than axes


@dataclass(frozen=True, eq=False)
class Axes:
    """The principal axes of rows divided by their gains, largest deviation first.

    ``variances``: fp32 (units, components): how much a component matters. ``encode``, ``decode``:
    fp32 (units, components, width), there and back. ``deviations``: fp32 (units, components).
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
        """Learns the axes of a stack from samples.

        ``means``: fp32 (elements of a token,), keys without RoPE.
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
        # The metric's roots are symmetric, so rows go through it as columns would.
        there, back = metric.forward(rows, 0)[0], metric.backward(rows, 0, None)
        gain = OctaveGain(shape, gain_steps(seen))
        return cls(samples, shape, means, gain, variances, there, back, deviations)

    def with_bits(self, bits: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the arrays that ``FixedRate.assemble`` takes.

        ``bits``: integers (units, components).
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
        """Returns gains as they are written; rows that are too large get the largest."""
        gains, _ = self.gain.measure(stack)
        return gains


def _shares(shape: StackShape, octaves: np.ndarray) -> np.ndarray:
    """Returns the weight of each unit's errors, fp64 (units,).

    Metrics are of errors relative to a *side*, K or V of a layer. A head whose rows are small
    beside those of its neighbours does as little harm by relative errors that are as large.
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
    """Chooses the gains that the rows of each unit may have, from the sizes that were seen.

    Half of them lie where most sizes are, half evenly over all sizes that were seen and a little
    above them: the few tokens that attention leans on are often the ones with unusual rows, and
    with gains for the many only, KL was a seventh higher. The last two lie far above, for rows
    unlike any that was learned from: those get coarse, but need not be kept as they are, five times
    as large.

    ``octaves``: floats (units, tokens), logarithms of sizes. Returns int16 (units, CODES),
    ascending, in steps.
    """
    seen = STEPS * octaves.astype(np.float64)
    lowest, highest = seen.min(axis=1), seen.max(axis=1) + BEYOND
    evenly = np.linspace(lowest, highest, seen.shape[1], axis=1)
    places = np.linspace(0, 1, INNER)
    inner = np.quantile(np.concatenate([seen, evenly], axis=1), places, axis=1).T
    steps = np.concatenate([inner, highest[:, None] + FAR], axis=1)
    whole: np.ndarray = np.clip(np.rint(steps), -32768, 32767).astype(np.int16)
    return whole
