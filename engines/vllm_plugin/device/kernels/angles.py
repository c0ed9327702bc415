"""Cosines and sines of RoPE on the device: the host's numbers, uploaded when first used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engines.vllm_plugin.device.accelerator import sent
from kvstore.codecs.rope import Rope, angle_tables

KEPT: Final = 256  # tables; 4 MB in all for chunks of 32 tokens and heads of 128 channels


class Angles:
    """Provides the angles of runs of tokens to the kernels of one stream, and caches some.

    Math libraries differ in the last bit, so the device never computes angles. Chunks of all
    sessions begin at the same positions, so each table is used many times. Freed memory is reused
    in the order of the stream, so another stream needs another object.
    """

    def __init__(self, ropes: Sequence[Rope], device: torch.device) -> None:
        self._ropes = tuple(ropes)
        self._device = device
        self.half: Final = max((len(x.frequencies) for x in ropes), default=1)
        self._of = lru_cache(maxsize=KEPT)(self._new)

    def of(self, position: int, count: int) -> Tensor:
        """Return fp32 (ropes, 2, count, half): cosines and sines of tokens ``position ..``."""
        return self._of(position, count)

    def _new(self, position: int, count: int) -> Tensor:
        tables = np.zeros((max(len(self._ropes), 1), 2, count, self.half), np.float32)
        for table, rope in zip(tables, self._ropes, strict=False):
            for part, values in zip(table, angle_tables(rope, position, count), strict=True):
                part[:, : values.shape[1]] = values
        return sent(torch.from_numpy(tables), self._device)
