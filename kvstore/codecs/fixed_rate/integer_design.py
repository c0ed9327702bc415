"""Derives the integers of ``integer_klt`` from a KLT and the bits of its components.

A component is restored as a level times a row of the basis, each of which is a byte. Their product
is given; how its range is split between the two is free. A level of few steps and a coarse row both
add noise, in proportion to the component itself. The split makes the sum of both smallest.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.fixed_rate.fitted_levels import gauss_levels
from kvstore.codecs.stages.integer_klt import NUM_MAGNITUDES, input_scale

LARGEST = 127
ENCODE_NORM = 32000.0
NEVER = np.iinfo(np.int32).max


def integers_of(
    encode: np.ndarray,
    decode: np.ndarray,
    deviations: np.ndarray,
    bits: np.ndarray,
    levels: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Returns the arrays of ``IntegerKlt`` and ``IntegerLevels``, components with most bits first.

    ``encode``, ``decode``: fp32 (units, components, width). Products of a row with ``encode`` are
    its components; the sum of components times rows of ``decode`` restores it. ``deviations``: fp32
    (units, components), of the components of rows of unit size. ``bits``: integers of the same
    shape. ``levels``: see ``fitted_levels``.
    """
    order = np.argsort(-bits.astype(np.int64), axis=1, kind="stable")
    order = order[:, : int((bits > 0).sum(axis=1).max(initial=1))]
    unit = np.arange(len(bits))[:, None]
    designs = [
        _unit(*parts)
        for parts in zip(
            encode[unit, order], decode[unit, order], deviations[unit, order], bits[unit, order],
            gauss_levels(len(bits)) if levels is None else levels, strict=True,
        )
    ]  # fmt: skip
    learned = {name: np.stack([design[name] for design in designs]) for name in designs[0]}
    learned["bits"] = bits[unit, order].astype(np.uint8)
    return learned


def _unit(
    encode: np.ndarray,
    decode: np.ndarray,
    deviations: np.ndarray,
    bits: np.ndarray,
    levels: np.ndarray,
) -> dict[str, np.ndarray]:
    norms = np.maximum(np.linalg.norm(encode, axis=1), 1e-30)
    rates = norms / (ENCODE_NORM * input_scale(encode.shape[1]))
    live = bits > 0
    spread = np.where(live, levels.max(axis=1)[bits], 1.0)
    outermost = spread * deviations
    rows = np.maximum(np.abs(decode).max(axis=1), 1e-30)
    scale = _scale(float((outermost * rows)[live].max(initial=1e-30)))
    room = outermost * rows / scale
    shape = np.sqrt(encode.shape[1]) * rows / np.maximum(np.linalg.norm(decode, axis=1), 1e-30)
    share = np.clip(np.sqrt(spread * room / shape), room / LARGEST, LARGEST)
    share = np.maximum(np.rint(share), 1)
    units = np.where(live, outermost / share, 1.0)
    factors = np.rint(decode * (units / scale)[:, None]) * live[:, None]
    tables = [levels[b, : (1 << int(b)) >> 1] for b in bits]
    sizes, bounds = _tables(tables, deviations, units, rates)
    return {
        "encode": np.rint(encode * (ENCODE_NORM / norms)[:, None]).astype(np.int16),
        "decode": np.clip(factors, -LARGEST, LARGEST).astype(np.int8),
        "scales": np.float32(scale),
        "units": units.astype(np.float32),
        "rates": rates.astype(np.float32),
        "levels": sizes,
        "bounds": bounds,
    }


def _scale(most: float) -> float:
    """Returns the scale of sums, a power of two: multiplying by it never rounds."""
    return float(2.0 ** np.ceil(np.log2(most / LARGEST**2)))


def _tables(
    tables: list[np.ndarray], deviations: np.ndarray, units: np.ndarray, rates: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    levels = np.zeros((len(tables), NUM_MAGNITUDES), np.uint8)
    bounds = np.full((len(tables), NUM_MAGNITUDES), NEVER, np.int32)
    for k, table in enumerate(tables):
        sizes = np.clip(np.rint(table * (deviations[k] / units[k])), 0, LARGEST)
        levels[k, : len(sizes)] = sizes
        between = np.rint((sizes[1:] + sizes[:-1]) / 2 * (units[k] / rates[k]))
        bounds[k, : len(between)] = np.clip(between, 0, NEVER)
    return levels, bounds
