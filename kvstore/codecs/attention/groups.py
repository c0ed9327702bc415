"""Rows in groups, each with a smallest value and a step, as KIVI packs them.

A value is ``low + step * code``. For groups along the width of a row

    q . row             = sum over groups of step (q_g . code_g) + low sum(q_g)
    sum of weight row_g = sum of (weight step) code_g + sum of weight low

For groups along tokens, steps and lows multiply the query of each group of tokens, or its sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class WidthGroups:
    """Groups of neighbouring values of a row. Implements ``Source``."""

    codes: np.ndarray  # fp32 (units, tokens, width)
    lows: np.ndarray  # fp32 (units, tokens, groups)
    steps: np.ndarray  # fp32 (units, tokens, groups)
    group: int

    def products(self, query: np.ndarray) -> np.ndarray:
        found = np.zeros((*query.shape[:2], self.codes.shape[1]), np.float32)
        for number, part in self._parts():
            steps, lows = self.steps[:, None, :, number], self.lows[:, None, :, number]
            q = query[:, :, part]
            found += np.matmul(q, self.codes[:, :, part].swapaxes(1, 2)) * steps
            found += q.sum(axis=2, keepdims=True) * lows
        return found

    def sums(self, weights: np.ndarray) -> np.ndarray:
        found = np.empty((*weights.shape[:2], self.codes.shape[2]), np.float32)
        lows = np.matmul(weights, self.lows)
        for number, part in self._parts():
            scaled = weights * self.steps[:, None, :, number]
            found[:, :, part] = np.matmul(scaled, self.codes[:, :, part])
            found[:, :, part] += lows[:, :, number, None]
        return found

    def rows(self) -> np.ndarray:
        width = self.codes.shape[2]
        steps, lows = (
            np.repeat(x, self.group, axis=2)[:, :, :width] for x in (self.steps, self.lows)
        )
        found: np.ndarray = self.codes * steps + lows
        return found

    def _parts(self) -> list[tuple[int, slice]]:
        starts = range(0, self.codes.shape[2], self.group)
        return [(number, slice(x, x + self.group)) for number, x in enumerate(starts)]


@dataclass(frozen=True, eq=False)
class TokenGroups:
    """Groups of neighbouring tokens, for each channel. Implements ``Source``."""

    codes: np.ndarray  # fp32 (units, tokens, width)
    lows: np.ndarray  # fp32 (units, width, groups)
    steps: np.ndarray  # fp32 (units, width, groups)
    group: int

    def products(self, query: np.ndarray) -> np.ndarray:
        found = np.empty((*query.shape[:2], self.codes.shape[1]), np.float32)
        lows = np.matmul(query, self.lows)
        for number, part in self._parts():
            scaled = query * self.steps[:, None, :, number]
            found[:, :, part] = np.matmul(scaled, self.codes[:, part].swapaxes(1, 2))
            found[:, :, part] += lows[:, :, number, None]
        return found

    def sums(self, weights: np.ndarray) -> np.ndarray:
        found = np.zeros((*weights.shape[:2], self.codes.shape[2]), np.float32)
        for number, part in self._parts():
            steps, lows = self.steps[:, None, :, number], self.lows[:, None, :, number]
            w = weights[:, :, part]
            found += np.matmul(w, self.codes[:, part]) * steps
            found += w.sum(axis=2, keepdims=True) * lows
        return found

    def rows(self) -> np.ndarray:
        tokens = self.codes.shape[1]
        steps, lows = (
            np.repeat(x, self.group, axis=2)[:, :, :tokens].swapaxes(1, 2)
            for x in (self.steps, self.lows)
        )
        found: np.ndarray = self.codes * steps + lows
        return found

    def _parts(self) -> list[tuple[int, slice]]:
        starts = range(0, self.codes.shape[1], self.group)
        return [(number, slice(x, x + self.group)) for number, x in enumerate(starts)]
