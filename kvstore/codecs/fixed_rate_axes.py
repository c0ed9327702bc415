"""What a calibrated preset of fixed rate learns of one stack: axes, gains, levels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvstore.codecs.fitted_levels import SizeCounts
from kvstore.codecs.gain_steps import gain_steps
from kvstore.codecs.integer_design import integers_of
from kvstore.codecs.pieces.gain import root_mean_squares
from kvstore.codecs.pieces.metric import HeadMetric
from kvstore.codecs.pieces.octave_gain import OctaveGain
from kvstore.codecs.samples import Samples
from kvstore.codecs.stacks import StackShape
from kvstore.codecs.statistics import principal_axes, unit_rows

LEVEL_TEXTS = 16  # of the samples, evenly chosen: levels need fewer than axes


@dataclass(frozen=True, eq=False)
class Axes:
    """Of rows divided by their gains, in the order of the deviations of what they give.

    variances: (units, components): how much a component matters. encode, decode: (units,
    components, width), there and back. deviations: (units, components).
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
        """What ``assemble`` takes. ``bits``: (units, components)."""
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
        """Gains as they are written, of rows that are too large the largest."""
        gains, _ = self.gain.measure(stack)
        return gains


def _shares(shape: StackShape, octaves: np.ndarray) -> np.ndarray:
    """The weight of each unit's errors, (units,): metrics are of errors relative to a *side*.

    ``octaves``: (units, tokens). A head whose rows are small beside those of its neighbours does
    as little harm by relative errors that are as large.
    """
    squares = np.exp2(2 * octaves.astype(np.float64))
    sides = [(unit[0].layer, unit[0].side) for unit in shape.units]
    shares = np.ones(len(sides))
    for side in set(sides):
        members = [number for number, other in enumerate(sides) if other == side]
        whole = np.maximum(squares[members].mean(axis=0), 1e-30)
        shares[members] = (squares[members] / whole).mean(axis=1)
    return shares
