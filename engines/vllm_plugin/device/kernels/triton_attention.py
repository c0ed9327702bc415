"""Launches ``attend_kernels`` for ``RotatedRows`` on the device that holds the packed rows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
import triton
from torch import Tensor

from engines.vllm_plugin.device.kernels.attend_kernels import scores_kernel, sums_kernel
from kvstore.codecs.rows import rotation
from kvstore.codecs.rows.rotated_rows import RotatedRows

TILE: Final = 8192  # values of the rows of a program, which it has in registers


class TritonAttention:
    """Products with packed rows of one format and length, and weighted sums, on one device.

    The definition is ``kvstore.codecs.attention.rotated``; arguments are those of its
    ``RowAttention``, as contiguous tensors on the device. Scales are int16, bits of fp16.
    """

    def __init__(self, rows: RotatedRows, dim: int, device: torch.device) -> None:
        turned = rotation.rotate(
            rotation.flip_signs(np.eye(dim, dtype=np.float32), rotation.sign_masks(dim))
        )
        self._matrix = torch.from_numpy(turned).to(device)
        levels = np.concatenate([rows.levels, -rows.levels]).astype(np.float32)
        self._levels = torch.from_numpy(levels).to(device)
        self._unit = torch.tensor([float(rows.unit_of(dim))], dtype=torch.float32, device=device)
        width = triton.next_power_of_2(dim)
        self._constants: dict[str, Any] = {"R": max(TILE // width, 1), "W": width}
        self._constants |= {"D": dim, "BITS": rows.num_bits}

    def scores(self, query: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Return products, fp32 (heads, queries, tokens)."""
        out = query.new_empty((*query.shape[:2], scales.shape[1]))
        self._launch(scores_kernel, query @ self._matrix, codes, scales, out)
        return out

    def weighted_sums(self, weights: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Return sums, fp32 (heads, queries, dim)."""
        heads, queries, tokens = weights.shape
        blocks = triton.cdiv(tokens, self._constants["R"])
        parts = weights.new_empty((heads, blocks, queries, self._constants["D"]))
        self._launch(sums_kernel, weights, codes, scales, parts)
        sums: Tensor = parts.sum(dim=1) @ self._matrix.T
        return sums

    def _launch(self, kernel: Any, given: Tensor, *rows: Tensor) -> None:
        codes, scales, out = rows
        heads, tokens = scales.shape
        grid = (triton.cdiv(tokens, self._constants["R"]), heads)
        if tokens:
            kernel[grid](
                given, codes, scales, self._levels, self._unit, out, tokens, given.shape[1],
                **self._constants,
            )  # fmt: skip
