"""Launches ``rate_kernels`` for one stack of a calibrated fixed rate on the device of the KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import triton
from torch import Tensor

from engines.vllm_plugin.device.kernels.rate_kernels import pack_rates_kernel, unpack_rates_kernel
from engines.vllm_plugin.device.kernels.rate_tables import RateTables
from engines.vllm_plugin.device.kv_views import KVViewGroup
from kvstore.codecs.stages.integer_klt import input_scale

DIMS: Final = (32, 64, 128, 256)
KINDS: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
WIDE: Final = 128
TOKENS: Final = 32  # of a program: the default length of a chunk
COMPONENTS: Final = 32  # of a tile when packing
COLUMNS: Final = 32  # of a tile when restoring


@dataclass(frozen=True, eq=False)
class RatePlaces:
    """The byte offsets of gains, planes and kept rows of a stack in a staging region.

    ``kept_at``: one bit for each unit and token, in whole bytes for each unit. A set bit marks a
    row that must be kept unpacked.
    """

    pairs_at: int
    planes_at: int
    kept_at: int


@dataclass(frozen=True, eq=False)
class RateRun:
    """The tokens of one launch.

    ``blocks``: int64 (num_blocks,) on the device, the blocks of a run of tokens. ``first``: the
    first token of that run to handle. ``count``: the tokens of each chunk. ``angles``: fp32
    (ropes, 2, num_angles, half); those of token ``first`` are at ``first_angle``.
    """

    blocks: Tensor
    first: int
    count: int
    angles: Tensor
    first_angle: int


class TritonRates:
    """The kernels for the units of one stack that belong to one group of sides.

    In every call ``payloads`` is uint8 (num_chunks, nbytes) on the device, for chunks that follow
    each other.
    """

    def __init__(
        self, group: KVViewGroup, first_units: Tensor, tables: RateTables, dtype: torch.dtype
    ) -> None:
        """Take the unit of the first head of each side, ``first_units``: int32 on the device."""
        self._group = group
        self._first_units = first_units
        self._tables = tables
        self._constants: dict[str, Any] = {
            "T": TOKENS, "D": group.dim, "K": tables.magnitudes, "KIND": KINDS[dtype],
        }  # fmt: skip
        if group.starts.device.type != "cpu":
            num_warps = 8 if group.dim > WIDE else 4  # with 4, 256 channels spill
            self._constants |= {"enable_fp_fusion": False, "num_warps": num_warps}

    @staticmethod
    def supports(dim: int, dtype: torch.dtype) -> bool:
        """Say whether there are kernels for this head dimension and dtype."""
        return dim in DIMS and dtype in KINDS

    def pack(self, run: RateRun, payloads: Tensor, places: RatePlaces) -> None:
        """Pack rows of blocks into gains and planes of ``payloads``; flag rows that do not fit."""
        t, grid = self._tables, self._grid(run.count, len(payloads))
        tiles = (int(np.prod(grid)), 2, COMPONENTS, TOKENS)
        scratch = torch.empty(tiles, dtype=torch.float32, device=self._group.starts.device)
        pack_rates_kernel[grid](
            *self._rows(run), payloads, payloads.stride(0),
            places.pairs_at, places.planes_at, places.kept_at,
            self._first_units, *_angles(run), scratch,
            t.rope_of, t.partners, t.columns, t.means, t.thresholds, t.ends, t.sizes,
            t.encode_high, t.encode_low, t.lives, t.bits, t.firsts, t.bounds, t.values, t.rates,
            CB=COMPONENTS, SCALE=float(input_scale(self._group.dim)), SHARE=1 / self._group.dim,
            **self._constants,
        )  # fmt: skip

    def unpack(self, run: RateRun, payloads: Tensor, places: RatePlaces) -> None:
        """Unpack rows of ``payloads`` into blocks; kept rows get undefined values."""
        t = self._tables
        unpack_rates_kernel[self._grid(run.count, len(payloads))](
            *self._rows(run), payloads, payloads.stride(0), places.pairs_at, places.planes_at,
            self._first_units, *_angles(run),
            t.rope_of, t.partners, t.columns, t.means, t.gains,
            t.decode, t.bits, t.firsts, t.levels,
            W=COLUMNS, **self._constants,
        )  # fmt: skip

    def _rows(self, run: RateRun) -> tuple[object, ...]:
        group = self._group
        arguments = group.launch_arguments(run.first, run.count)
        return group.views[0], group.starts, run.blocks, *arguments

    def _grid(self, count: int, num_chunks: int) -> tuple[int, int, int]:
        heads = int(self._group.views[0].shape[1])
        return num_chunks * triton.cdiv(count, TOKENS), heads, len(self._group.views)


def _angles(run: RateRun) -> tuple[object, ...]:
    _, _, num_angles, half = run.angles.shape
    return run.angles, half, num_angles, run.first_angle
