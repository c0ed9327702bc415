"""Launches ``row_kernels`` for ``RotatedRows`` on the device that holds the KV."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
import triton
from torch import Tensor

from engines.vllm_plugin.device.kernels.row_kernels import (
    gather_kernel,
    pack_kernel,
    scatter_kernel,
    unpack_kernel,
)
from engines.vllm_plugin.device.kv_views import KVViewGroup
from kvstore.codecs.rows import rotation
from kvstore.codecs.rows.rotated_rows import RotatedRows, size_of, squared_levels

ROWS: Final = 16  # per program
DIMS: Final = (32, 64, 128, 256)


class TritonRows:
    """The kernels for one row format on one device, for groups of bf16 or fp16 sides.

    In every call ``blocks``, int64 (num_blocks,) on the device, are the blocks of a run of tokens
    in order. ``payloads``, uint8 (num_chunks, nbytes) on the device, has a row for each of several
    consecutive chunks of ``count`` tokens, the first of which begins at token ``first`` of the run.
    ``offsets``, int64 (num_sides, 2) on the device, holds for each side the start of its packed
    rows in a payload, in bytes, and the start of its scales, in units of two bytes.
    """

    def __init__(self, rows: RotatedRows, dim: int, dtype: torch.dtype, device: torch.device):
        self._signs = _floats(np.where(rotation.sign_masks(dim) > 0, -1, 1), device)
        self._bounds = _floats(rows.bounds, device)
        self._levels = _floats(rows.levels, device)
        self._unit = _floats(np.array([rows.unit_of(dim)]), device)
        self._size = size_of(dim)
        squares = torch.tensor(squared_levels(rows.num_bits), dtype=torch.int32)
        self._squares = squares.to(device)
        fp16 = int(dtype == torch.float16)
        self._constants: dict[str, Any] = {"R": ROWS, "D": dim, "BITS": rows.num_bits, "FP16": fp16}
        if device.type != "cpu":
            self._constants["enable_fp_fusion"] = False

    @staticmethod
    def supports(rows: object, dim: int, dtype: torch.dtype) -> bool:
        """Return whether there are kernels for this row format, head dimension and dtype."""
        return (
            isinstance(rows, RotatedRows)
            and rows.num_bits in (3, 4)
            and dim in DIMS
            and dtype in (torch.bfloat16, torch.float16)
        )

    def pack(
        self,
        group: KVViewGroup,
        blocks: Tensor,
        first: int,
        count: int,
        payloads: Tensor,
        offsets: Tensor,
    ) -> None:
        """Pack rows of blocks into the packed rows and scales of ``payloads``."""
        pack_kernel[(*_grid(group, count), len(payloads))](
            group.views[0], group.starts, blocks, *group.launch_arguments(first, count),
            payloads, payloads.view(torch.int16), payloads.stride(0), offsets,
            self._signs, self._bounds, self._squares, SIZE=self._size, **self._constants,
        )  # fmt: skip

    def unpack(
        self,
        group: KVViewGroup,
        blocks: Tensor,
        first: int,
        count: int,
        payloads: Tensor,
        offsets: Tensor,
    ) -> None:
        """Unpack rows of ``payloads`` into blocks; rows with a scale of zero are skipped."""
        unpack_kernel[(*_grid(group, count), len(payloads))](
            group.views[0], group.starts, blocks, *group.launch_arguments(first, count),
            payloads, payloads.view(torch.int16), payloads.stride(0), offsets,
            self._signs, self._levels, self._unit, **self._constants,
        )  # fmt: skip


def gather(
    group: KVViewGroup, blocks: Tensor, first: int, count: int, out: Tensor, offsets: Tensor
) -> None:
    """Copy rows from blocks into ``out``, uint8 (nbytes,).

    ``offsets``, int64 (num_sides,) on the device, count in elements of the cache.
    """
    gather_kernel[_grid(group, count)](
        group.views[0], group.starts, blocks, *group.launch_arguments(first, count),
        out.view(group.views[0].dtype), offsets, group.dim, R=ROWS, W=_width(group),
    )  # fmt: skip


def scatter(
    group: KVViewGroup, blocks: Tensor, first: int, count: int, source: Tensor, offsets: Tensor
) -> None:
    """Copy rows from ``source`` into blocks; the inverse of ``gather``."""
    scatter_kernel[_grid(group, count)](
        group.views[0], group.starts, blocks, *group.launch_arguments(first, count),
        source.view(group.views[0].dtype), offsets, group.dim, R=ROWS, W=_width(group),
    )  # fmt: skip


def _grid(group: KVViewGroup, count: int) -> tuple[int, int]:
    return triton.cdiv(group.launch_arguments(0, count)[0], ROWS), len(group.views)


def _width(group: KVViewGroup) -> int:
    return int(triton.next_power_of_2(group.dim))


def _floats(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(device)
