"""Finds a model's rotary embedding (RoPE) by applying it and reading the result.

Engines have half a dozen rotary classes each (plain, Llama 3, Yarn, proportional, ...), with names
of their own for their parameters. All of them multiply by a matrix for each position, which
rotates pairs of channels and may scale all of them alike. So ``read_rope`` rotates the identity
matrix, reads the pairs and angles off the result, and checks them at other positions.
``check_turning`` checks them on real keys of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engines.calibration.instrument import Instrument
from engines.calibration.measuring.metrics import widened
from kvstore.shapes import Rope

# Returns for a position fp32 (dim, dim), whose row i is the rotated unit vector of channel i.
Turned = Callable[[int], np.ndarray]

# The number of positions (1, 2, 4, ...) at which angles are refined: sines may be in bf16.
DOUBLINGS = 11
TRIED_AT = (0, 7, 1000)  # positions at which the found embedding is checked
UNBOUNDED = 1 << 62
TOLERANCE = 1.5e-2
NOT_UNDERSTOOD = "this model rotates its keys in a way that is not understood"

NUM_EQUAL_TOKENS = 256
NUM_UNSETTLED = 96  # the first tokens, left out: attention sinks vary quickly there
# As a fraction of a key's norm; with a wrong rotation, keys differ by about their norm.
LARGEST_DRIFT = 0.15


def read_rope(turned: Turned, num_positions: int = UNBOUNDED) -> Rope | None:
    """Return the rotary embedding that ``turned`` applies; None if it rotates nothing.

    ``num_positions``: the number of positions for which ``turned`` may be called.

    Raises:
        ValueError: ``turned`` does something else than to rotate pairs of channels.
    """
    rope = _read(turned, num_positions)
    # Yarn scales all rotated channels.
    stretch = np.linalg.norm(turned(1), axis=1, keepdims=True)
    for position in (x for x in TRIED_AT if x < num_positions):
        found = turned(position)
        expected = _turn(np.eye(len(found)), rope, np.full(len(found), position)) * stretch
        if not np.allclose(found, expected, atol=TOLERANCE):
            raise ValueError(NOT_UNDERSTOOD)
    return rope


def check_turning(instrument: Instrument, ropes: Sequence[Rope | None]) -> None:
    """Check ``ropes`` on a prompt that repeats one token.

    Attention then has the same result at every position, so all keys must be equal once they are
    rotated back. The first ones are left out, and the median decides, since attention sinks, and a
    router that chooses other experts, change the result at some positions.

    Raises:
        ValueError: the keys are not equal.
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
    """Return the radians per token of each pair, by its first channel."""
    firsts, seconds = np.array([*pairs]), np.array([*pairs.values()])
    found = np.zeros(len(pairs))
    for position in (1 << x for x in range(DOUBLINGS) if 1 << x < num_positions):
        matrix = turned(position).astype(np.float64)
        seen = np.arctan2(matrix[firsts, seconds], matrix[firsts, firsts])
        turns = np.round((found * position - seen) / (2 * np.pi)) if position > 1 else 0.0
        found = (seen + 2 * np.pi * turns) / position
    return dict(zip(pairs, found.tolist(), strict=True))


def _turn(rows: np.ndarray, rope: Rope | None, positions: np.ndarray) -> np.ndarray:
    """Return rows, (..., num_rows, dim), each rotated by its position; below 0, backwards."""
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
