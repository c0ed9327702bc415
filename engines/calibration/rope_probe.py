"""Finds a model's rotary embedding (RoPE) by applying it and reading the result.

Engines have half a dozen rotary classes each (plain, Llama 3, Yarn, proportional, ...), with names
of their own for their parameters. All do the same: they multiply by a matrix for each position,
which turns pairs of channels and may stretch all of them alike. So the identity matrix is turned
and pairs and angles are read off the result. They are checked at other positions
(``read_rope``), and in the end on real keys of the model (``check_turning``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engines.calibration.instrument import Instrument
from engines.calibration.measuring.metrics import widened
from kvstore.shapes import Rope

# From a position to a matrix, fp32 (dim, dim), whose row i is the unit vector of channel i, turned.
Turned = Callable[[int], np.ndarray]

# Engines may keep sines in bf16: angles are read again and again, each time at twice the position.
DOUBLINGS = 11
TRIED_AT = (0, 7, 1000)
UNBOUNDED = 1 << 62
TOLERANCE = 1.5e-2
NOT_UNDERSTOOD = "this model turns its keys in a way that is not understood"

NUM_EQUAL_TOKENS = 256
NUM_UNSETTLED = 96  # the first of them; the shares of attention sinks fall quickly there
# As a share of a key's length. With a wrong rotation keys are as far apart as they are long.
LARGEST_DRIFT = 0.15


def read_rope(turned: Turned, num_positions: int = UNBOUNDED) -> Rope | None:
    """Return the rotary embedding that ``turned`` applies; None if it turns nothing.

    ``num_positions``: that ``turned`` knows.

    Raises:
        ValueError: it does something else than turning pairs of channels.
    """
    rope = _read(turned, num_positions)
    # Yarn stretches all channels that are turned.
    stretch = np.linalg.norm(turned(1), axis=1, keepdims=True)
    for position in (x for x in TRIED_AT if x < num_positions):
        found = turned(position)
        expected = _turn(np.eye(len(found)), rope, np.full(len(found), position)) * stretch
        if not np.allclose(found, expected, atol=TOLERANCE):
            raise ValueError(NOT_UNDERSTOOD)
    return rope


def check_turning(instrument: Instrument, ropes: Sequence[Rope | None]) -> None:
    """Check ``ropes`` on a prompt that repeats one token.

    Attention then takes the same from the past at every position, so the keys must all be equal
    once they are turned back. The first ones are left out, and the median decides: where heads have
    sinks, attention takes less from a shorter past, and a router may choose other experts for it.

    Raises:
        ValueError: they are not equal.
    """
    token = (instrument.encode(" the") or [0])[-1]
    run = instrument.prefill([token] * max(NUM_EQUAL_TOKENS, instrument.state_step)).run
    for rope, (keys, values) in zip(ropes, run, strict=True):
        rotated = values if rope is not None and rope.side == "values" else keys
        wide = widened(rotated, instrument.layout)
        plain = _turn(wide, rope, -np.arange(wide.shape[1]))[:, NUM_UNSETTLED:]
        middle = plain.mean(1, keepdims=True)
        drift = np.median(np.linalg.norm(plain - middle, axis=-1), axis=1)
        if (drift > LARGEST_DRIFT * np.linalg.norm(middle[:, 0], axis=-1)).any():
            raise ValueError(NOT_UNDERSTOOD)


def _read(turned: Turned, num_positions: int) -> Rope | None:
    first = turned(1)
    dim = len(first)
    partners = np.abs(np.where(np.eye(dim, dtype=bool), 0, first)).argmax(1).tolist()
    pairs = {i: x for i, x in enumerate(partners) if x > i and abs(first[i, x]) > 0}
    if not pairs:
        return None
    angles = _angles(turned, pairs, num_positions)
    interleaved = all(partner == i + 1 for i, partner in pairs.items()) and dim > 2
    step = 1 if interleaved else max(partner - i for i, partner in pairs.items())
    count = max(pairs) // 2 + 1 if interleaved else step
    firsts = range(0, 2 * count, 2) if interleaved else range(count)
    return Rope(tuple(angles.get(i, 0.0) for i in firsts), interleaved)


def _angles(turned: Turned, pairs: dict[int, int], num_positions: int) -> dict[int, float]:
    """Radians per token, for the first channel of each pair."""
    firsts, seconds = np.array([*pairs]), np.array([*pairs.values()])
    found = np.zeros(len(pairs))
    for position in (1 << x for x in range(DOUBLINGS) if 1 << x < num_positions):
        matrix = turned(position).astype(np.float64)
        seen = np.arctan2(matrix[firsts, seconds], matrix[firsts, firsts])
        turns = np.round((found * position - seen) / (2 * np.pi)) if position > 1 else 0.0
        found = (seen + 2 * np.pi * turns) / position
    return dict(zip(pairs, found.tolist(), strict=True))


def _turn(rows: np.ndarray, rope: Rope | None, positions: np.ndarray) -> np.ndarray:
    """Rotate rows, (..., num_rows, dim), each by its position; below 0 it is rotated back."""
    if rope is None:
        return rows
    half = len(rope.frequencies)
    pairs = np.arange(2 * half).reshape((half, 2) if rope.interleaved else (2, half))
    firsts, seconds = pairs.T if rope.interleaved else pairs
    angles = np.outer(positions, rope.frequencies)
    cos, sin = np.cos(angles), np.sin(angles)
    turned = rows.copy()
    turned[..., firsts] = rows[..., firsts] * cos - rows[..., seconds] * sin
    turned[..., seconds] = rows[..., firsts] * sin + rows[..., seconds] * cos
    return turned
