"""The tables of one stack of a calibrated fixed rate on the KV's device, and the kernel launches.

The tables hold the integers of the rate in the order in which ``rate_kernels`` read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch
import triton
from torch import Tensor

from engines.vllm_plugin.device.kernels.rate_kernels import pack_rates_kernel, unpack_rates_kernel
from engines.vllm_plugin.device.kv_views import KVViewGroup
from kvstore.codecs.fixed_rate.rate_pipeline import RatePipeline
from kvstore.codecs.stacks.stack_shape import HeadVector, StackShape
from kvstore.codecs.stages.gain import THRESHOLDS, ends_of
from kvstore.codecs.stages.integer_klt import NUM_MAGNITUDES, input_scale
from kvstore.shapes import Rope

LARGEST_FACTOR: Final = 127 * 256 + 127  # the largest that fits two signed digits of one byte each
NOT_TURNED: Final = -1
DIMS: Final = (32, 64, 128, 256)
KINDS: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
WIDE: Final = 128
TOKENS: Final = 32  # per program: the default length of a chunk
COMPONENTS: Final = 32  # per tile when packing
COLUMNS: Final = 32  # per tile when restoring


@dataclass(frozen=True, eq=False)
class DeviceRateTables:
    """The tables of one stack, C = D components wide, those without bits last.

    Attributes:
        encode_high: int8 (units, C, D), each factor divided by 256, rounded to nearest.
        encode_low: int8 (units, C, D), the remainder.
        decode: int8 (units, D, C), the basis for restoring.
        bits: int32 (units, C).
        firsts: int32 (units, C), the number of each component's first plane.
        lives: int32 (units,), the number of components with bits.
        bounds: int32 (units, K, C), where K is the largest number of magnitudes of a component.
        values: fp32 (units, K, C), levels as used in fitting the gain.
        levels: uint8 (units, K, C).
        rates: fp32 (units, C), the value of one unit of a component's integer.
        means: fp32 (units, D).
        ends: int32 (units, 16), the largest size, in steps, for each gain.
        sizes: fp32 (units, 16), gains.
        gains: fp32 (units, 16), gains times the value of one unit of a restored sum.
        thresholds: int32 (16,), mantissas half-way between steps.
        rope_of: int32 (units,), 0 = not rotated, or 1 more than the number of its rope.
        partners: int32 (ropes + 1, D), the channel that each channel is rotated with.
        columns: int32 (ropes + 1, D), the index of the angle that rotates it; below zero for none.
    """

    encode_high: Tensor
    encode_low: Tensor
    decode: Tensor
    bits: Tensor
    firsts: Tensor
    lives: Tensor
    bounds: Tensor
    values: Tensor
    levels: Tensor
    rates: Tensor
    means: Tensor
    ends: Tensor
    sizes: Tensor
    gains: Tensor
    thresholds: Tensor
    rope_of: Tensor
    partners: Tensor
    columns: Tensor

    @property
    def magnitudes(self) -> int:
        """The largest number of magnitudes of a component."""
        return int(self.bounds.shape[1])


def rate_tables(
    pipeline: RatePipeline, ropes: Sequence[Rope], device: torch.device
) -> DeviceRateTables | None:
    """Copy the tables of a stack to the device; None if a factor does not fit two digits.

    ``ropes``: all ropes that the stack's layers use.
    """
    if int(np.abs(pipeline.integers.encode.astype(np.int32)).max()) > LARGEST_FACTOR:
        return None
    arrays = _integers(pipeline) | _gains(pipeline) | _turns(pipeline, ropes)
    assert arrays.keys() == {x.name for x in fields(DeviceRateTables)}
    return DeviceRateTables(**{name: torch.from_numpy(x).to(device) for name, x in arrays.items()})


def ropes_of(pipeline: RatePipeline) -> tuple[Rope, ...]:
    """Return the different ropes that rotate keys of this stack."""
    used = (_rope(pipeline, unit) for unit in range(pipeline.shape.num_units))
    return tuple(dict.fromkeys(x for x in used if x is not None))


def _integers(pipeline: RatePipeline) -> dict[str, np.ndarray]:
    known, width = pipeline.integers, pipeline.shape.width
    bits = _padded(known.bits.astype(np.int32), width)
    magnitudes = max(int(1 << bits.max()) >> 1, 1)
    assert magnitudes <= NUM_MAGNITUDES
    encode = _padded(known.encode.astype(np.int32), width)
    high = (encode + 128) >> 8
    flat = bits.reshape(-1)
    levels = _padded(known.levels[:, :, :magnitudes], width).swapaxes(1, 2)
    units = _padded(known.units.astype(np.float32), width)
    bounds = _padded(known.bounds[:, :, :magnitudes], width).swapaxes(1, 2)
    found = {
        "encode_high": high.astype(np.int8),
        "encode_low": (encode - (high << 8)).astype(np.int8),
        "decode": _padded(known.decode, width).swapaxes(1, 2),
        "bits": bits,
        "firsts": (np.cumsum(flat) - flat).reshape(bits.shape).astype(np.int32),
        "lives": (bits > 0).sum(axis=1).astype(np.int32),
        "bounds": bounds,
        "values": levels.astype(np.float32) * units[:, None],
        "levels": levels,
        "rates": _padded(known.rates.astype(np.float32), width),
        "means": pipeline.means[pipeline.shape.elements].astype(np.float32),
    }
    return {name: np.ascontiguousarray(x) for name, x in found.items()}


def _gains(pipeline: RatePipeline) -> dict[str, np.ndarray]:
    sizes = pipeline.gain.table()
    scales = pipeline.integers.scales.astype(np.float32)
    return {
        "ends": ends_of(pipeline.gain.steps),
        "sizes": sizes,
        "gains": sizes * scales[:, None],
        "thresholds": THRESHOLDS.astype(np.int32),
    }


def _turns(pipeline: RatePipeline, ropes: Sequence[Rope]) -> dict[str, np.ndarray]:
    width, units = pipeline.shape.width, range(pipeline.shape.num_units)
    numbers = {None: 0} | {rope: number + 1 for number, rope in enumerate(ropes)}
    partners = np.tile(np.arange(width, dtype=np.int32), (len(ropes) + 1, 1))
    columns = np.full(partners.shape, NOT_TURNED, np.int32)
    for number, rope in enumerate(ropes):
        half = len(rope.frequencies)
        k = np.arange(half)
        one, other = (2 * k, 2 * k + 1) if rope.interleaved else (k, k + half)
        partners[number + 1, one], partners[number + 1, other] = other, one
        columns[number + 1, one] = columns[number + 1, other] = k
    rope_of = np.array([numbers[_rope(pipeline, unit)] for unit in units], np.int32)
    return {"rope_of": rope_of, "partners": partners, "columns": columns}


def _rope(pipeline: RatePipeline, unit: int) -> Rope | None:
    return vector_of(pipeline.shape, unit).rope(pipeline.ropes)


def vector_of(shape: StackShape, unit: int) -> HeadVector:
    """Return the only head vector of a unit: a fixed rate works on single heads."""
    (vector,) = shape.units[unit]
    return vector


def _padded(array: np.ndarray, components: int) -> np.ndarray:
    """Pad the second axis of an array (units, components, ...) with zeros."""
    missing = components - array.shape[1]
    return np.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2))


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

    In every call ``payloads`` is uint8 (num_chunks, nbytes) on the device, for consecutive chunks.
    """

    def __init__(
        self, group: KVViewGroup, first_units: Tensor, tables: DeviceRateTables, dtype: torch.dtype
    ) -> None:
        """``first_units``: int32 (num_sides,) on the device, the unit of each side's first head."""
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
        """Return whether there are kernels for this head dimension and dtype."""
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
