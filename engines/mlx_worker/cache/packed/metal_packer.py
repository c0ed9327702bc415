"""Packs ``tq3`` and ``tq4`` by Metal kernels: one SIMD group of 32 lanes packs or unpacks one row.

Element ``e`` of a row is value number ``e / 32`` of lane ``e % 32``. So butterflies of a distance
below 32 are shuffles between lanes, and the others stay inside a lane; a ballot of all lanes on one
bit of their codes gives four bytes of a bit plane.

The bytes must equal the definition's, so only sums of integers may be reordered: mlx compiles
without fast math, and every product that is added to something is exact in fp32.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache.packed.rows import NeverCopied, RowKind
from kvstore.codecs import floats
from kvstore.codecs.rows import rotated_rows, rotation

LANES: Final = 32
_ROWS_PER_GROUP: Final = 4


def has_metal_kernel(kind: RowKind) -> bool:
    """Return whether the dimension is a power of two with at least two values per lane."""
    order = rotation.order_of(kind.dim)
    return order is not None and order.base == 1 and kind.dim >= 2 * LANES


class MetalRowPacker(NeverCopied):
    """A ``RowPacker`` for Metal, for kinds with ``has_metal_kernel``."""

    def __init__(self, kind: RowKind) -> None:
        self.kind = kind
        name = f"{kind.num_bits}_{kind.dim}_{kind.stored}"
        self._pack = mx.fast.metal_kernel(
            name=f"thermocline_pack_{name}",
            input_names=["rows"],
            output_names=["codes", "scales"],
            source=pack_source(kind),
        )
        self._unpack = mx.fast.metal_kernel(
            name=f"thermocline_unpack_{name}",
            input_names=["codes", "scales"],
            output_names=["rows"],
            source=unpack_source(kind),
        )

    def pack(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        leading = rows.shape[:-1]
        num_rows = rows.size // self.kind.dim
        row_nbytes = self.kind.format.packed_nbytes(self.kind.dim)
        codes, scales = self._run(
            self._pack,
            num_rows,
            [mx.contiguous(rows).view(mx.uint16)],
            [(*leading, row_nbytes), leading],
            [mx.uint8, mx.uint16],
        )
        return codes, scales

    def unpack(self, codes: mx.array, scales: mx.array) -> mx.array:
        shape = (*scales.shape, self.kind.dim)
        inputs = [mx.contiguous(codes), mx.contiguous(scales)]
        (rows,) = self._run(self._unpack, scales.size, inputs, [shape], [mx.uint16])
        return rows.view(self.kind.dtype)

    def _run(
        self,
        kernel: Any,
        num_rows: int,
        inputs: list[mx.array],
        shapes: list[tuple[int, ...]],
        dtypes: list[mx.Dtype],
    ) -> list[mx.array]:
        outputs: list[mx.array] = kernel(
            inputs=inputs,
            grid=(num_rows * LANES, 1, 1),  # exact, since Metal allows a smaller last group
            threadgroup=(min(num_rows, _ROWS_PER_GROUP) * LANES, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )
        return outputs


# ---- source


_BEGIN = """
    uint row = thread_position_in_grid.x / 32;
    uint lane = thread_index_in_simdgroup;
"""


@functools.cache
def pack_source(kind: RowKind) -> str:
    """Return the body of the kernel that packs ``rows``, bit patterns in uint16."""
    values, bits, dim = kind.dim // LANES, kind.num_bits, kind.dim
    bounds = [str(bound) for bound in kind.format.bounds]
    squares = ", ".join(str(x) for x in rotated_rows.squared_levels(bits))
    size, spare = rotated_rows.size_of(dim), rotated_rows.SPARE_BITS
    fraction = _float(np.float32(kind.format.one / size))
    root = _float(np.float32(1 / kind.format.one))
    return f"""{_BEGIN}
    const uint signs[{values}] = {{{_sign_words(dim)}}};
    const int bounds[{len(bounds)}] = {{{", ".join(bounds)}}};
    const int squares[{len(bounds) + 1}] = {{{squares}}};
    float x[{values}];
    float terms[{values}];
    for (uint i = 0; i < {values}; i++) {{
        float value = {_widened(kind, f"rows[row * {dim} + i * 32 + lane]")};
        uint word = as_type<uint>(value);
        x[i] = (word & 0x7fffffffu) < {_word(rotated_rows.SMALLEST)} ? 0.0f : as_type<float>(word);
        float square = x[i] * x[i];
        terms[i] = square + simd_shuffle_xor(square, 1);
    }}
    for (uint half_size = {values // 2}; half_size > 0; half_size /= 2)
        for (uint i = 0; i < half_size; i++) terms[i] = terms[i] + terms[i + half_size];
    float total = terms[0];
    for (ushort distance = 16; distance > 1; distance /= 2)
        total = total + simd_shuffle_xor(total, distance);
    float norm = metal::precise::sqrt(total);
    uint factor = as_type<uint>(float({size}) / norm) >> {spare} << {spare};
    for (uint i = 0; i < {values}; i++) {{
        float whole = metal::rint(x[i] * as_type<float>(factor));
        x[i] = as_type<float>(as_type<uint>(whole) ^ (((signs[i] >> lane) & 1u) << 31));
    }}
{_butterflies(values, ascending=True)}
    int energy = 0;
    for (uint i = 0; i < {values}; i++) {{
        int place = int(metal::floor(x[i] * {fraction}));
        int size = place < 0 ? -1 - place : place;
        uint code = 0;
        for (uint k = 0; k < {len(bounds)}; k++) code += size >= bounds[k] ? 1u : 0u;
        energy += squares[code];
        code |= place < 0 ? {1 << (bits - 1)}u : 0u;
        for (uint bit = 0; bit < {bits}; bit++) {{
            uint vote = uint((simd_vote::vote_t)simd_ballot(((code >> bit) & 1u) != 0));
            if (lane < 4)
                codes[row * {bits * dim // 8} + bit * {dim // 8} + i * 4 + lane] =
                    uchar((vote >> (8 * lane)) & 255u);
        }}
    }}
    energy = simd_sum(energy);
    float scale = norm / (metal::precise::sqrt(float(energy)) * {root});
    uint word = as_type<uint>(scale);
    uint rounded = ((word + 0xfffu + ((word >> 13) & 1u)) >> 13) - {floats.REBIAS}u;
    bool normal = (rounded - {floats.FP16_SMALLEST_NORMAL}u) <
        {floats.FP16_INFINITY - floats.FP16_SMALLEST_NORMAL}u;
    if (lane == 0) scales[row] = normal ? ushort(rounded) : ushort(0);
"""


@functools.cache
def unpack_source(kind: RowKind) -> str:
    """Return the body of the kernel that unpacks into bit patterns, uint16."""
    values, bits, dim = kind.dim // LANES, kind.num_bits, kind.dim
    levels = [str(level) for level in kind.format.levels]
    return f"""{_BEGIN}
    const uint signs[{values}] = {{{_sign_words(dim)}}};
    const float levels[{len(levels)}] = {{{", ".join(levels)}}};
    float unit = {unit_source(kind, "scales[row]")};
    float x[{values}];
    for (uint i = 0; i < {values}; i++) {{
        uint code = 0;
        for (uint bit = 0; bit < {bits}; bit++) {{
            uint plane = codes[row * {bits * dim // 8} + bit * {dim // 8} + i * 4 + lane / 8];
            code |= ((plane >> (lane % 8)) & 1u) << bit;
        }}
        float level = levels[code & {(1 << (bits - 1)) - 1}u];
        x[i] = (code >> {bits - 1}) ? -level : level;
    }}
{_butterflies(values, ascending=False)}
    for (uint i = 0; i < {values}; i++) {{
        uint word = as_type<uint>(x[i] * unit) ^ (((signs[i] >> lane) & 1u) << 31);
        rows[row * {dim} + i * 32 + lane] = {_narrowed(kind)};
    }}
"""


def unit_source(kind: RowKind, scale: str) -> str:
    """Return Metal source for the value of a level of one; zero for a row that is not packed."""
    size = f"as_type<float>((uint({scale}) + {floats.REBIAS}u) << 13)"
    return f"{scale} == 0 ? 0.0f : {size} * {_float(kind.format.unit_of(kind.dim))}"


def _butterflies(values: int, ascending: bool) -> str:
    """Return Metal source of the butterflies, from distance 1 up, or from the largest down.

    Distances 1 to 16 lie between lanes, the larger ones inside a lane.
    """
    between = """
        {
            for (uint i = 0; i < VALUES; i++) {
                float other = simd_shuffle_xor(x[i], ushort(distance));
                x[i] = (lane & distance) ? other - x[i] : x[i] + other;
            }
        }""".replace("VALUES", str(values))
    inside = """
        for (uint i = 0; i < VALUES; i++) {
            if (i & distance) continue;
            float first = x[i], second = x[i + distance];
            x[i] = first + second;
            x[i + distance] = first - second;
        }""".replace("VALUES", str(values))
    if ascending:
        return (
            f"    for (uint distance = 1; distance < 32; distance *= 2){between}\n"
            f"    for (uint distance = 1; distance < {values}; distance *= 2){inside}"
        )
    return (
        f"    for (uint distance = {values // 2}; distance > 0; distance /= 2){inside}\n"
        f"    for (uint distance = 16; distance > 0; distance /= 2){between}"
    )


def _sign_words(dim: int) -> str:
    """Return Metal source of the random signs; bit ``b`` of word ``i`` is for value 32 i + b."""
    negative = (rotation.sign_masks(dim) >> 31).astype(np.uint8)
    words = np.packbits(negative, bitorder="little").view("<u4")
    return ", ".join(f"{word:#010x}u" for word in words)


def _widened(kind: RowKind, stored: str) -> str:
    if kind.stored == "float16":
        return f"float(as_type<half>({stored}))"
    return f"as_type<float>(uint({stored}) << 16)"


def _narrowed(kind: RowKind) -> str:
    """Return Metal source that rounds to the stored dtype, to nearest even; fp16 saturates."""
    if kind.stored == "float16":
        largest = _float(floats.FP16_LARGEST)
        return f"as_type<ushort>(half(metal::clamp(as_type<float>(word), -{largest}, {largest})))"
    return "ushort((word + 0x7fffu + ((word >> 16) & 1u)) >> 16)"


def _float(value: np.float32) -> str:
    """Return Metal source of exactly this fp32, independent of the compiler's decimal rounding."""
    return f"as_type<float>({_word(value)})"


def _word(value: np.float32) -> str:
    return f"{int(np.float32(value).view(np.uint32)):#010x}u"
