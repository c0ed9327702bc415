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

PAGE_TOKENS: Final = 512
KEPT: Final = 32  # tables; 8 MB in all for one RoPE and heads of 128 channels


class Angles:
    """Provides the angles of runs of tokens to the kernels of one stream, and caches some.

    Math libraries differ in the last bit, so the device never computes angles. A table has a page
    of positions, which are the same in all sessions. Freed memory is reused in the order of the
    stream, so another stream needs another object.
    """

    def __init__(self, ropes: Sequence[Rope], device: torch.device) -> None:
        self._ropes = tuple(ropes)
        self._device = device
        self.half: Final = max((len(x.frequencies) for x in ropes), default=1)
        self._of = lru_cache(maxsize=KEPT)(self._new)

    def of(self, position: int, count: int) -> tuple[Tensor, int]:
        """Return a table of cosines and sines, and the place in it of token ``position``.

        The table is fp32 (ropes, 2, num_tokens, half) and covers ``count`` tokens from there on.
        """
        first = position - position % PAGE_TOKENS
        if position + count <= first + PAGE_TOKENS:
            return self._of(first, PAGE_TOKENS), position - first
        return self._of(position, count), 0

    def _new(self, position: int, count: int) -> Tensor:
        tables = np.zeros((max(len(self._ropes), 1), 2, count, self.half), np.float32)
        for table, rope in zip(tables, self._ropes, strict=False):
            for part, values in zip(table, angle_tables(rope, position, count), strict=True):
                part[:, : values.shape[1]] = values
        return sent(torch.from_numpy(tables), self._device)
