"""Learns the axes, gains and levels of one stack, for a fixed-rate preset."""

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

BEYOND = STEPS // 2  # how many steps the highest usual gain lies above the largest observed size
FAR = (STEPS, 4 * STEPS)  # how many steps the last two gains lie above that one
INNER = CODES - len(FAR)
LEVEL_TEXTS = 16  # evenly spaced among the samples' texts: levels need fewer than axes


@dataclass(frozen=True, eq=False)
class Axes:
    """The principal axes of rows divided by their gains, largest deviation first.

    ``variances``: fp32 (units, components): the weight of each component's errors. ``encode``,
    ``decode``: fp32 (units, components, width), to components and back to rows. ``deviations``:
    fp32 (units, components).
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
        """Returns gains as they are written; rows that are too large get the largest gain."""
        gains, _ = self.gain.measure(stack)
        return gains


def _shares(shape: StackShape, octaves: np.ndarray) -> np.ndarray:
    """Returns the weight of each unit's errors, fp64 (units,).

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
    """Chooses the gains that the rows of each unit may have, from the observed sizes.

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
    whole: np.ndarray = np.clip(np.rint(steps), -32768, 32767).astype(np.int16)
    return whole
