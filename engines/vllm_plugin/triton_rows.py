"""``RotatedRows`` on the device that holds the KV: the launches of ``triton_kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import triton
from torch import Tensor

from engines.vllm_plugin.triton_kernels import pack_kernel, unpack_kernel
from kvstore.codecs import rotation
from kvstore.codecs.rotated_rows import RotatedRows, inverse_root, squared_levels

ROWS: Final = 16  # per program
DIMS: Final = (32, 64, 128, 256)


@dataclass(frozen=True)
class TritonRows:
    """One row format on one device.

    ``cache`` in every call is a view (num_blocks, num_kv_heads, block_tokens, head_dim) of bf16 or
    fp16, last axis contiguous; ``blocks`` (int64) the run's blocks in order; the rows are those of
    tokens ``first_token .. first_token + num_tokens`` of that run, head by head.
    """

    rows: RotatedRows
    dim: int
    device: torch.device

    @staticmethod
    def supports(rows: object, dim: int, dtype: torch.dtype) -> bool:
        return (
            isinstance(rows, RotatedRows)
            and rows.num_bits in (3, 4)
            and dim in DIMS
            and dtype in (torch.bfloat16, torch.float16)
        )

    def pack(
        self, cache: Tensor, blocks: Tensor, first: int, count: int, packed: Tensor, scales: Tensor
    ) -> None:
        """Fill ``packed`` uint8 (num_rows, packed_nbytes) and ``scales`` int16 bits (num_rows,)."""
        sizes = _sizes(cache, first, count)
        pack_kernel[_grid(sizes[0])](
            cache.view(torch.int16), blocks, packed, scales, self._signs, self._bounds,
            self._squares, *sizes, **self._constants(cache),
        )  # fmt: skip

    def unpack(
        self, cache: Tensor, blocks: Tensor, first: int, count: int, packed: Tensor, scales: Tensor
    ) -> None:
        """The inverse; rows with a scale of zero are left alone."""
        sizes = _sizes(cache, first, count)
        unpack_kernel[_grid(sizes[0])](
            cache.view(torch.int16), blocks, packed, scales, self._signs, self._levels, *sizes,
            self._unit, **self._constants(cache),
        )  # fmt: skip

    @property
    def _signs(self) -> Tensor:
        masks = rotation.sign_masks(self.dim)
        return self._floats(np.where(masks > 0, -1, 1))

    @property
    def _bounds(self) -> Tensor:
        return self._floats(self.rows.table.bound_array)

    @property
    def _squares(self) -> Tensor:
        return torch.tensor(squared_levels(self.rows.num_bits), dtype=torch.int32).to(self.device)

    @property
    def _levels(self) -> Tensor:
        return self._floats(self.rows.table.level_array)

    @property
    def _unit(self) -> Tensor:
        return self._floats(np.array([inverse_root(self.dim)]))

    def _floats(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(self.device)

    def _constants(self, cache: Tensor) -> dict[str, Any]:
        fp16 = int(cache.dtype == torch.float16)
        fixed = {"R": ROWS, "D": self.dim, "BITS": self.rows.num_bits, "FP16": fp16}
        return fixed if cache.device.type == "cpu" else {**fixed, "enable_fp_fusion": False}


def _sizes(cache: Tensor, first: int, count: int) -> tuple[int, ...]:
    _, heads, block_tokens, _ = cache.shape
    s_block, s_head, s_token = cache.stride()[:3]
    return heads * count, first, count, block_tokens, s_block, s_head, s_token


def _grid(num_rows: int) -> tuple[int]:
    return (triton.cdiv(num_rows, ROWS),)
