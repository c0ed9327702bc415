"""Products with packed rows on the device that holds them, and sums of weighted ones, in Triton.

Rows stay packed; see ``kvstore.codecs.attention.rotated``. A program handles ``R`` rows of a head,
and all queries of that head one after the other. Queries are rotated, and sums rotated back, by
``TritonAttention``. Sums of floats have no fixed order here: values are close, not equal.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstore.codecs.rows import rotation
from kvstore.codecs.rows.rotated_rows import RotatedRows

TILE: Final = 8192  # values of the rows of a program, which it has in registers


@triton.jit
def _rows(
    codes, scales, levels, unit, num_tokens, R: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Return this program's rows before their rotation, fp32 (R, W), and their numbers."""
    token = tl.program_id(0) * R + tl.arange(0, R)
    ok = token < num_tokens
    row = tl.program_id(1).to(tl.int64) * num_tokens + token
    d = tl.arange(0, W)
    keep = ok[:, None] & (d < D)[None, :]
    source = codes + row[:, None] * (BITS * D // 8) + (d // 8)[None, :]
    code = tl.zeros((R, W), tl.int32)
    for bit in tl.static_range(BITS):
        plane = tl.load(source + bit * (D // 8), mask=keep, other=0).to(tl.int32)
        code += ((plane >> (d % 8)[None, :]) & 1) << bit
    stored = tl.load(scales + row, mask=ok, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
    size = ((stored + 114688) << 13).to(tl.float32, bitcast=True) * tl.load(unit)
    size = tl.where(stored == 0, 0.0, size)
    return tl.load(levels + code, mask=keep, other=0.0) * size[:, None], token, ok


@triton.jit(do_not_specialize=("num_tokens", "num_queries"))
def scores_kernel(
    query, codes, scales, levels, unit, out, num_tokens, num_queries,
    R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Write the products of this program's rows with the rotated queries of their head."""
    rows, token, ok = _rows(codes, scales, levels, unit, num_tokens, R, W, D, BITS)
    d = tl.arange(0, W)
    first = tl.program_id(1).to(tl.int64) * num_queries
    for q in range(num_queries):
        values = tl.load(query + (first + q) * D + d, mask=d < D, other=0.0)
        products = tl.sum(rows * values[None, :], 1)
        tl.store(out + (first + q) * num_tokens + token, products, mask=ok)


@triton.jit(do_not_specialize=("num_tokens", "num_queries"))
def sums_kernel(
    weights, codes, scales, levels, unit, out, num_tokens, num_queries,
    R: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Write the weighted sum of this program's rows: ``out`` has a part for each program."""
    rows, token, ok = _rows(codes, scales, levels, unit, num_tokens, R, W, D, BITS)
    d = tl.arange(0, W)
    first = tl.program_id(1).to(tl.int64) * num_queries
    part = out + (first * tl.num_programs(0) + tl.program_id(0) * num_queries) * D
    for q in range(num_queries):
        weight = tl.load(weights + (first + q) * num_tokens + token, mask=ok, other=0.0)
        tl.store(part + q * D + d, tl.sum(rows * weight[:, None], 0), mask=d < D)


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
