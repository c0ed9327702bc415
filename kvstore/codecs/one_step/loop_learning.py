"""Learns the integers of one stack of a one-step preset: unit by unit, in the loop that packs.

A unit's rows are regressed on the restored bytes of the units before, the residual's principal axes
are found in the metric of the errors, and the unit is packed, so that the next one learns from the
bytes that a reader will have. Rows of all texts together would take gibibytes where units are wide:
each step reads them piece by piece, and only the restored bytes stay in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple, TypeAlias

import numpy as np

from kvstore.codecs.entropy.tables import FIRST_WIDE, NUM_CLASSES, classes_of, ratio_of
from kvstore.codecs.learning.samples import Samples, unit_rows
from kvstore.codecs.one_step.closed_loop import (
    BYTE,
    LARGEST_LEVEL,
    MOST_BITS,
    NUM_LEVELS,
    ROUNDING,
    ClosedLoop,
    LoopIntegers,
    encode_norm,
    most_input,
)
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import COARSE, root_mean_squares
from kvstore.codecs.stages.model_transforms import HeadMetric

# Tokens to sample from all texts together: a fixed number, plus some for each channel that predicts
# and for each channel of a unit. Learning the levels alone, which comes first, needs fewer.
SAMPLED_TOKENS, PREPARING_TOKENS = 12_288, 3_072
TOKENS_OF_KNOWN, TOKENS_OF_OWN = 8, 4
# Values of rows that are looked at together, and of a unit's rows that stay in memory meanwhile; if
# there are more, they are made anew for each look.
PIECE_VALUES, KEPT_VALUES = 1 << 20, 8 << 20
RIDGE, LEAST_RIDGE = 0.003, 1e-30  # of the known channels' mean variance
# A component whose residual's deviation is less than this share of a step is dropped: its rare
# codes cost more bits than their effect is worth.
LIVE_RATIO = 0.3
FINEST, FINEST_WIDE = 8, 32  # levels of a step
REACH_WIDE = 16  # deviations that levels of wide components can hold
MOST_FINER = 8  # bits
KNOWN_REACH = 4.5  # the largest byte of a restored channel, in deviations
REST_REACH = 16  # the largest residual of a channel, in deviations
ROOM = 2.0**30  # the largest sum of a row
LIKELY = 50  # codes whose centroid is taken to be the middle of their cell


def least_unit(width: int) -> float:
    """Return the least unit in which rows of unit size still fit 32 bits, a power of two."""
    return float(2.0 ** np.ceil(np.log2(4 * width**0.5 / ROOM)))


class Centroids:
    """Finds how far the centroids of cells lie from their middles, for each class of components."""

    def __init__(self) -> None:
        self._totals, self._counts = np.zeros((2, NUM_CLASSES * NUM_LEVELS))

    def add(self, components: np.ndarray, classes: np.ndarray) -> None:
        """Add ``components``, fp32 (tokens, components), in steps. ``classes``: (components,)."""
        sizes = np.floor(np.abs(components) + ROUNDING)
        beyond = np.abs(components) - sizes
        keys = classes * NUM_LEVELS + np.minimum(sizes, NUM_LEVELS - 1).astype(np.int64)
        self._totals += np.bincount(keys.reshape(-1), beyond.reshape(-1), len(self._totals))
        self._counts += np.bincount(keys.reshape(-1), minlength=len(self._counts))

    def levels(self) -> np.ndarray:
        """Return the array for ``LoopIntegers.levels``: int16 (classes, NUM_LEVELS)."""
        ratios = ratio_of(np.arange(NUM_CLASSES))
        per_step = np.clip(LARGEST_LEVEL // (REACH_WIDE * ratios), 1, FINEST_WIDE)
        per_step[:FIRST_WIDE] = FINEST
        shifts = (self._totals / (self._counts + LIKELY)).reshape(NUM_CLASSES, NUM_LEVELS)
        levels = np.rint(per_step[:, None] * shifts)
        levels[:, 0] = per_step
        return levels.astype(np.int16)


class _Piece(NamedTuple):
    """Sampled rows of one unit, fp32 (tokens, width), of unit size; the gains of all rows.

    ``past``: int8 (tokens, channels), the bytes of the units before.
    """

    rows: np.ndarray
    gains: np.ndarray
    past: np.ndarray


_Pieces: TypeAlias = Callable[[], Iterable[_Piece]]


class StackLearner:
    """Learns the integers of one stack while its caller iterates over ``codes``."""

    def __init__(
        self,
        samples: Samples,
        shape: StackShape,
        means: np.ndarray,
        step: float,
        reach: int,
        levels: np.ndarray,
        num_tokens: int,
    ) -> None:
        """``reach``: the largest number of channels from which a unit is predicted. ``num_tokens``:
        the least number of tokens to sample from all texts together; see ``SAMPLED_TOKENS``.
        """
        self._samples, self._shape, self._means = samples, shape, means
        self._step, self._levels = np.float32(step), levels
        wanted = max(num_tokens, TOKENS_OF_KNOWN * reach, TOKENS_OF_OWN * shape.width)
        if num_tokens < SAMPLED_TOKENS:
            wanted = num_tokens
        self._stride = max(samples.num_tokens // wanted, 1)
        enough = samples.num_tokens // self._stride // TOKENS_OF_KNOWN
        self._reach = min(reach, enough // 16 * 16)
        self._units: list[LoopIntegers] = []
        self._gain_steps: list[np.ndarray] = []
        self.centroids: Centroids | None = None

    def codes(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield codes and their classes, unit by unit and piece by piece.

        Codes are int32 (components, tokens), classes int64 (components,).
        """
        past, units = list[np.ndarray](), np.zeros(0, np.float32)
        for number in range(self._shape.num_units):
            own = StackShape((self._shape.units[number],), self._shape.gain_groups)
            pieces = self._pieces_of(own, past)
            integers = self._learn(own, pieces, units)
            self._units.append(integers)
            loop, num = ClosedLoop(integers), int(integers.counts.sum())
            after, gains = list[np.ndarray](), list[np.ndarray]()
            for piece in pieces():
                codes, _, known = loop.follow(0, piece.rows, piece.past)
                after.append(loop.joined(piece.past, known))
                gains.append(piece.gains)
                yield codes[:, :num].T, integers.classes[0, :num].astype(np.int64)
            steps = np.rint(COARSE * np.log2(np.concatenate(gains)))
            self._gain_steps.append(steps.astype(np.int64))
            values = np.exp2(integers.exponents[0].astype(np.float32) + integers.down[0])
            past, units = after, loop.joined(units[None], values[None])[0]

    def _pieces_of(self, own: StackShape, past: Sequence[np.ndarray]) -> _Pieces:
        """Return the sampled rows of one unit, to go over several times."""
        if self._samples.num_tokens // self._stride * own.width > KEPT_VALUES:
            return functools.partial(self._pieces, own, past)
        kept = list(self._pieces(own, past))
        return lambda: kept

    def _pieces(self, own: StackShape, past: Sequence[np.ndarray]) -> Iterator[_Piece]:
        """Yield the sampled rows of one unit. ``past``: the bytes for each piece, or empty."""
        for number, parts in enumerate(self._parts(own)):
            rows, gains = (np.concatenate(x) for x in zip(*parts, strict=True))
            before = past[number] if past else np.zeros((len(rows), 0), np.int8)
            yield _Piece(rows, gains, before)

    def _parts(self, own: StackShape) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
        """Yield sampled rows and the gains of all rows, as many as make a piece."""
        parts, num_tokens = list[tuple[np.ndarray, np.ndarray]](), 0
        for stack, gains in unit_rows(self._samples, own, self._means, self._sizes):
            rows = stack[0, :: self._stride].copy()
            parts.append((rows, gains[0]))
            num_tokens += len(rows)
            if num_tokens * own.width >= PIECE_VALUES:
                yield parts
                parts, num_tokens = [], 0
        if parts:
            yield parts

    def _sizes(self, stack: np.ndarray) -> np.ndarray:
        sizes = root_mean_squares(stack, self._shape)
        steps = np.rint(COARSE * np.log2(np.maximum(sizes, 1e-9)))
        return np.exp2(steps / COARSE).astype(np.float32)

    def _learn(self, own: StackShape, pieces: _Pieces, units: np.ndarray) -> LoopIntegers:
        metric = HeadMetric(own, self._samples.roots(own))
        weights, row_sizes = _regression(own.width, pieces, units)

        def residuals() -> Iterator[np.ndarray]:
            for piece in pieces():
                yield piece.rows - piece.past.astype(np.float32) @ weights

        width = own.width
        covariance, squares = np.zeros((width, width), np.float32), np.zeros(width)
        num_tokens = 0
        for rows in residuals():
            weighted = metric.forward(rows[None], 0)[0][0]
            covariance += weighted.T @ weighted
            squares += np.square(rows).sum(axis=0)
            num_tokens += len(rows)
        covariance /= num_tokens
        variances, axes = np.linalg.eigh(covariance)
        deviations = np.sqrt(np.maximum(variances[::-1], 0))
        num = int((deviations > LIVE_RATIO * self._step).sum())
        axes = np.ascontiguousarray(axes[:, ::-1][:, :num].T)
        classes = classes_of(deviations[:num] / self._step)
        if self.centroids is not None:
            for rows in residuals():
                weighted = metric.forward(rows[None], 0)[0][0]
                self.centroids.add(weighted @ axes.T / self._step, classes)
        # The metric's roots are symmetric, so it may be applied to rows as if they were columns.
        encode = metric.forward(axes[None], 0)[0][0] / self._step
        decode = metric.backward(axes[None], 0, None)[0] * self._step
        sizes = (np.sqrt(squares / num_tokens).astype(np.float32), row_sizes)
        return integers_of(self._levels, self._reach, weights, (encode, decode), classes, sizes)

    @property
    def integers(self) -> LoopIntegers:
        """The integers of all units."""
        return stacked(self._units)

    def gains(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the centres of gains, int16, and their classes, uint8: both (units, groups)."""
        centres = [np.rint(x.mean(axis=0)) for x in self._gain_steps]
        pairs = zip(self._gain_steps, centres, strict=True)
        deviations = np.stack([(x - centre).std(axis=0) for x, centre in pairs])
        classes = np.maximum(classes_of(deviations), 1)
        return np.stack(centres).astype(np.int16), classes.astype(np.uint8)

    def gain_codes(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield, unit by unit, the codes of its gains and their classes."""
        for steps, centre, classes in zip(self._gain_steps, *self.gains(), strict=True):
            yield (steps - centre).T, classes.astype(np.int64)


def integers_of(
    levels: np.ndarray,
    reach: int,
    weights: np.ndarray,
    axes: tuple[np.ndarray, np.ndarray],
    classes: np.ndarray,
    sizes: tuple[np.ndarray, np.ndarray],
) -> LoopIntegers:
    """Return the integers of one unit.

    ``weights``: (known, width), of bytes. ``axes``: (components, width) each: rows that give
    components of residuals, in steps, and the change of a row by one step. ``classes``: falling.
    ``sizes``: the deviations of residuals and of rows, in each channel.
    """
    encode, decode = axes
    width, wide = decode.shape[1], int((classes >= FIRST_WIDE).sum())
    steps = decode / levels[classes, :1]
    peaks, wide_peaks = (np.abs(x).max(axis=0, initial=0) for x in (steps[wide:], steps[:wide]))
    finest = np.maximum(wide_peaks / LARGEST_LEVEL, least_unit(width))
    units = np.exp2(np.ceil(np.log2(np.maximum(peaks / BYTE, finest))))
    finer = int(min(np.floor(np.log2(units / finest)).min(), MOST_FINER)) if wide else 0
    up = _bits(np.abs(weights).max(axis=0, initial=0) / units / BYTE)
    known = np.zeros((reach, width), np.int8)
    known[reach - len(weights) :] = _rounded(weights / (units * np.exp2(up)), BYTE)
    rest = _bits(REST_REACH * sizes[0] / units / most_input(width))
    encode = encode * (units * np.exp2(rest))
    norm, norms = encode_norm(width), np.maximum(np.linalg.norm(encode, axis=1), 1e-30)
    return LoopIntegers(
        known=known[None],
        up=up.astype(np.uint8)[None],
        wide=_rounded(steps[:wide] / units * 2**finer, LARGEST_LEVEL).astype(np.int16)[None],
        own=_rounded(steps[wide:] / units, BYTE).astype(np.int8)[None],
        finer=np.array([finer], np.uint8),
        exponents=np.rint(np.log2(units)).astype(np.int8)[None],
        down=_bits(KNOWN_REACH * sizes[1] / BYTE / units).astype(np.uint8)[None],
        encode=np.rint(encode * (norm / norms)[:, None]).astype(np.int16)[None],
        rates=(norms / norm).astype(np.float32)[None],
        rest=rest.astype(np.uint8)[None],
        classes=classes.astype(np.uint8)[None],
        levels=levels,
    )


def stacked(units: list[LoopIntegers]) -> LoopIntegers:
    """Join the integers of units; arrays with fewer rows are padded with zeros."""
    names = [x.name for x in fields(LoopIntegers) if x.name != "levels"]
    stacks = {name: _stacked([getattr(x, name) for x in units]) for name in names}
    return LoopIntegers(**stacks, levels=units[0].levels)


def _regression(width: int, pieces: _Pieces, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights with which known bytes predict rows, and the deviations of rows.

    They are fp32 (known, width) and (width,). ``units``: of the bytes.
    """
    num_known = len(units)
    among, with_rows = np.zeros((num_known, num_known)), np.zeros((num_known, width))
    squares, num_tokens = np.zeros(width), 0
    for rows, _, past in pieces():
        known = past.astype(np.float32) * units
        among += known.T @ known
        with_rows += known.T @ rows
        squares += np.square(rows).sum(axis=0)
        num_tokens += len(rows)
    if not num_tokens:
        raise ValueError("nothing can be learned from no text")
    sizes = np.sqrt(squares / num_tokens).astype(np.float32)
    if not num_known:
        return np.zeros((0, width), np.float32), sizes
    ridge = max(RIDGE * float(np.diag(among).mean()), LEAST_RIDGE * num_tokens)
    among[np.diag_indices_from(among)] += ridge
    weights = np.linalg.solve(among, with_rows) * units[:, None]
    return weights.astype(np.float32), sizes


def _bits(sizes: np.ndarray) -> np.ndarray:
    """Return the bits by which numbers must be shifted to become at most one."""
    return np.clip(np.ceil(np.log2(np.maximum(sizes, 1))), 0, MOST_BITS)


def _rounded(values: np.ndarray, limit: int) -> np.ndarray:
    return np.clip(np.rint(values), -limit, limit)


def _stacked(parts: list[np.ndarray]) -> np.ndarray:
    """Join arrays along the first axis; the second one is padded with zeros."""
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    most = max(x.shape[1] for x in parts)
    shape = (len(parts), most, *parts[0].shape[2:])
    stacked = np.zeros(shape, parts[0].dtype)
    for number, part in enumerate(parts):
        stacked[number, : part.shape[1]] = part[0]
    return stacked
