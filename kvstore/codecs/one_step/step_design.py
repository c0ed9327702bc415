"""Derives the integers of ``integer_rows`` from a KLT and the deviations of its components.

A component is restored as a level times a row of integers. A one in the sums has the same value for
all components of a unit, so a finer level means a coarser row. The cost of rounding a row is in
proportion to the component's variance; the cost of rounding a level is the same at any size. The
range is shared between the two so that both together cost least.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from kvstore.codecs.stages.integer_rows import BYTE, ENCODE_NORM, StepRows, input_scale
from kvstore.codecs.stages.uniform import LARGEST_LEVEL, NUM_SHIFTS

# Ratios of deviation to step, from which on components have 16 bits: the first that is sufficient.
WIDE_RATIOS = (6.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.0, 0.0)
MOST_NOISE = 0.004  # of rounded rows, relative to the error that quantising leaves
FINEST = 16  # levels of a step
FINEST_WIDE = 32
MOST_FINER = 8  # bits
REACH, REACH_WIDE = 4.5, 16.0  # largest level, in deviations; larger ones take longer, or are cut
ROOM = 2.0**30  # the largest sum


def rows_of(
    encode: np.ndarray, decode: np.ndarray, ratios: np.ndarray, shifts: np.ndarray
) -> tuple[StepRows, np.ndarray]:
    """Returns the rows, and the levels that ``UniformStep`` takes.

    Levels are int16 (units, components, NUM_SHIFTS). ``encode``: fp32 (units, components, width):
    its products with rows are components. ``decode``: of the same shape: the change of a row by one
    step of a component. ``ratios``: fp32 (units, components): deviations over steps, falling, zero
    for a dead component. ``shifts``: fp32 (units, components, NUM_SHIFTS), of centroids, in steps.
    """
    units = [_unit(x, r[r > 0].astype(np.float64)) for x, r in zip(decode, ratios, strict=True)]
    per_step = np.ones(ratios.shape)
    for number, (own, _, _, _) in enumerate(units):
        per_step[number, : len(own)] = own
    levels = np.rint(per_step[:, :, None] * shifts)
    levels[:, :, 0] = per_step
    wide = _stacked([rows[: counts[0]] for _, rows, counts, _ in units], np.int16)
    rows = _stacked([rows[counts[0] :] for _, rows, counts, _ in units], np.int8)
    counts = np.array([counts for _, _, counts, _ in units], np.int32)
    scales = np.array([scale for _, _, _, scale in units], np.float32)
    integers = (*_encode(encode), wide, rows, counts, scales)
    return StepRows(*integers), levels.astype(np.int16)


def _encode(encode: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    norms = np.maximum(np.linalg.norm(encode, axis=2), 1e-30)
    rows = np.rint(encode * (ENCODE_NORM / norms)[:, :, None])
    rates = norms / (ENCODE_NORM * input_scale(encode.shape[2]))
    return rows.astype(np.int16), rates.astype(np.float32)


_Design: TypeAlias = tuple[np.ndarray, np.ndarray, tuple[int, int, int], float]


def _unit(decode: np.ndarray, ratios: np.ndarray) -> _Design:
    """Returns levels per step, rows, counts and scale of one unit."""
    decode = decode[: len(ratios)]
    norms = np.maximum(np.linalg.norm(decode, axis=1), 1e-30)
    left = float((ratios**2 / (1 + 12 * ratios**2)).sum())  # a step's error, or the whole variance
    for ratio in WIDE_RATIOS:
        design = _design(decode, ratios, norms, int((ratios > ratio).sum()))
        per_step, rows, (wide, _, finer), scale = design
        worth = np.where(np.arange(len(ratios)) < wide, 2.0**-finer, 1.0) * per_step * scale
        missed = np.linalg.norm(rows * worth[:, None] - decode, axis=1) / norms * ratios
        if float((missed**2).sum()) <= MOST_NOISE * left:
            break
    return design


def _design(decode: np.ndarray, ratios: np.ndarray, norms: np.ndarray, wide: int) -> _Design:
    width, is_wide = decode.shape[1], np.arange(len(ratios)) < wide
    peaks = np.maximum(np.abs(decode).max(axis=1), 1e-30)
    reach = np.where(is_wide, REACH_WIDE, REACH) * ratios + NUM_SHIFTS / 2
    per_step = np.clip(np.floor(LARGEST_LEVEL / reach), 1, FINEST_WIDE)
    finest = float((peaks / per_step)[:wide].max(initial=0)) / LARGEST_LEVEL
    finest = max(finest, 4 * width**0.5 / ROOM)
    scale = max(float((peaks * reach)[wide:].max(initial=0)) / BYTE**2, finest)
    scale = float(2.0 ** np.ceil(np.log2(scale)))
    finer = min(int(np.log2(scale / finest)), MOST_FINER) if wide else 0
    noise = scale * ratios * np.sqrt(width) / norms
    shared = np.sqrt(np.sqrt(np.minimum(ratios, 1)) / noise)
    shared = np.clip(np.rint(shared), 1, np.minimum(np.floor(BYTE / reach), FINEST))
    shared = np.maximum(shared, np.ceil(peaks / (BYTE * scale)))
    per_step[wide:] = shared[wide:]
    worth = per_step * scale
    worth[:wide] /= 2**finer
    return per_step, np.rint(decode / worth[:, None]), (wide, len(ratios) - wide, finer), scale


def _stacked(parts: list[np.ndarray], kind: type[np.signedinteger]) -> np.ndarray:
    """Stacks the units' rows, padded with rows of zeros."""
    stacked = np.zeros((len(parts), max(len(x) for x in parts), parts[0].shape[1]), kind)
    for number, part in enumerate(parts):
        stacked[number, : len(part)] = part
    return stacked
