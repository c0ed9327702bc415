"""The rotation that a model applies to its keys by position (RoPE, arXiv 2104.09864).

RoPE rotates pairs of channels by position times frequency. This is only the description, a part of
every profile; ``stages.un_rope`` uses it to rotate keys back. Latent attention keeps its rotated
keys in the place of values.
"""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

RotatedSide: TypeAlias = Literal["values"]


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rotation that a model applies to the first channels of every head of its keys.

    ``frequencies``: radians per token, one for each pair of channels. ``interleaved``: channel 2i
    is paired with 2i + 1, not channel i with i + len(frequencies). ``side``: "values" if the
    rotated keys lie in the place of values; left out of a file otherwise.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False
    side: RotatedSide | UnsetType = UNSET

    @property
    def num_channels(self) -> int:
        """The number of channels that are rotated; they are the first ones of a head."""
        return 2 * len(self.frequencies)


@functools.lru_cache(maxsize=256)
def angle_tables(rope: Rope, first_token: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines for tokens ``first_token ..``.

    Both fp32 (num_tokens, channels / 2).
    """
    positions = np.arange(first_token, first_token + num_tokens, dtype=np.float64)
    angles = np.outer(positions, np.array(rope.frequencies, np.float64))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
