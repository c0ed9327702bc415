"""One row packed and unpacked; the counterpart of ``codecs.rotated_rows``.

Packing takes three steps over a block of rows. The first writes planes and norms; the second counts
levels in the planes, with integer units that the first leaves idle; the third makes scales of norms
and counts, many rows at a time. In one step a row would wait for two roots and a division in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from kvstore.codecs import floats
from kvstore.codecs.kernels import rotation
from kvstore.codecs.kernels.dtypes import load_row, store_row
from kvstore.codecs.kernels.emitter import F32, I16, I32, SIGN_BIT, Emitter, Value, f32
from kvstore.codecs.lloyd_max import GaussTable, gauss_table
from kvstore.codecs.rotated_rows import ENERGY_UNIT, inverse_root, squared_levels
from kvstore.codecs.rotation import Order, order_of, sign_masks
from kvstore.shapes import DType

MAX_LANES = 16
MIN_POWER = 4  # below it, and beyond MAX_BASE, the code gets long and the dimensions are rare
MAX_BASE = 28


@dataclass(frozen=True)
class RowShape:
    """What one kernel is made for."""

    num_bits: int
    dim: int
    dtype: DType

    @property
    def order(self) -> Order:
        order = order_of(self.dim)
        assert order is not None
        return order

    @property
    def lanes(self) -> int:
        """A group of the rotation takes two vectors at least."""
        return min(self.order.power // 2, MAX_LANES)

    @property
    def table(self) -> GaussTable:
        return gauss_table(1 << self.num_bits)


def has_kernel(dim: int) -> bool:
    order = order_of(dim)
    return order is not None and order.power >= MIN_POWER and order.base <= MAX_BASE


def emit_pack(e: Emitter, shape: RowShape, row: Value, packed: Value, norm: Value) -> None:
    """Step 1: planes to ``packed``, the fp32 norm to ``norm``."""
    x = load_row(e, shape.dtype, row, sign_masks(shape.dim))
    length = e.sqrt(rotation.squared_norm(e, shape.order, x))
    bounds = [e.builder.fmul(e.all_floats(b), e.splat(length)) for b in shape.table.bounds]
    z = rotation.rotate(e, shape.order, x)
    masks = [[*_magnitude_masks(e, bounds, v), _sign_mask(e, v)] for v in z]
    for number, plane in enumerate(zip(*masks, strict=True)):
        at = number * shape.dim // 8
        for bits in e.whole_bytes(plane):
            e.store(bits, packed, at)
            at += bits.type.width // 8
    e.store(length, norm, 0)


def _magnitude_masks(e: Emitter, bounds: list[Value], x: Value) -> list[Value]:
    """A binary search: each bit of the count of bounds below |x| decides which is looked at next.

    Lowest bit first.
    """
    size = e.magnitude(x)
    masks: list[Value] = []
    while bounds:
        middle = len(bounds) // 2
        mask = e.builder.fcmp_ordered(">", size, bounds[middle])
        halves = zip(bounds[:middle], bounds[middle + 1 :], strict=True)
        bounds = [e.builder.select(mask, high, low) for low, high in halves]
        masks.insert(0, mask)
    return masks


def _sign_mask(e: Emitter, x: Value) -> Value:
    return e.builder.icmp_signed("<", e.as_words(x), e.all_words(0))


def emit_energy(e: Emitter, shape: RowShape, packed: Value, energy: Value) -> None:
    """Step 2: the sum of squared levels of one packed row, i32, to ``energy``.

    A level's square is written as a sum over subsets of its magnitude bits, so that one population
    count per subset of planes is all it takes.
    """
    squares = squared_levels(shape.num_bits)
    total: Value = ir.Constant(I32, shape.dim * squares[0])
    for subset in range(1, len(squares)):
        count = _count_subset(e, shape, packed, subset)
        weight = ir.Constant(I32, _subset_weight(squares, subset))
        total = e.builder.add(total, e.builder.mul(count, weight))
    e.store(total, energy, 0)


def _subset_weight(squares: tuple[int, ...], subset: int) -> int:
    """Inclusion and exclusion: what having all of these bits adds to having only some."""
    parts = [part for part in range(subset + 1) if part & subset == part]
    return sum(squares[part] * (-1) ** (subset ^ part).bit_count() for part in parts)


def _count_subset(e: Emitter, shape: RowShape, packed: Value, subset: int) -> Value:
    """How many elements have all of these magnitude bits, i32."""
    total: Value = ir.Constant(I32, 0)
    planes = [k for k in range(shape.num_bits - 1) if subset >> k & 1]
    at, plane_nbytes = 0, shape.dim // 8
    while at < plane_nbytes:
        nbytes = next(n for n in (8, 4, 2, 1) if n <= plane_nbytes - at)
        words = [e.load(packed, k * plane_nbytes + at, ir.IntType(8 * nbytes)) for k in planes]
        hits = words[0]
        for word in words[1:]:
            hits = e.builder.and_(hits, word)
        total = e.builder.add(total, e.popcount(hits))
        at += nbytes
    return total


def emit_scales(e: Emitter, norms: Value, energies: Value, scales: Value) -> None:
    """Step 3, ``e.lanes`` rows: norm / sqrt(energy) as normal fp16, else zero, to ``scales``."""
    b = e.builder
    energy = b.sitofp(e.load(energies, 0, e.words), e.floats)
    length = b.fmul(e.sqrt(energy), e.all_floats(ENERGY_UNIT**0.5))
    bits = e.as_words(b.fdiv(e.load(norms, 0, e.floats), length))
    odd = b.and_(b.lshr(bits, e.all_words(13)), e.all_words(1))
    rounded = b.lshr(b.add(b.add(bits, e.all_words(0xFFF)), odd), e.all_words(13))
    rounded = b.sub(rounded, e.all_words(floats.REBIAS))
    above = b.sub(rounded, e.all_words(floats.FP16_SMALLEST_NORMAL))
    width = e.all_words(floats.FP16_INFINITY - floats.FP16_SMALLEST_NORMAL)
    kept = b.select(b.icmp_unsigned("<", above, width), rounded, e.all_words(0))
    e.store(b.trunc(kept, ir.VectorType(I16, e.lanes)), scales, 0)


def emit_unpack(e: Emitter, shape: RowShape, packed: Value, scale: Value, row: Value) -> None:
    bits = e.builder.zext(e.load(scale, 0, I16), I32)
    wide = e.builder.shl(e.builder.add(bits, ir.Constant(I32, floats.REBIAS)), ir.Constant(I32, 13))
    unit = e.builder.fmul(e.builder.bitcast(wide, F32), f32(inverse_root(shape.dim)))
    sizes = [e.builder.fmul(e.all_floats(level), e.splat(unit)) for level in shape.table.levels]
    z = [_levels(e, shape, packed, i, sizes) for i in range(shape.dim // e.lanes)]
    x = rotation.rotate_back(e, shape.order, z)
    store_row(e, shape.dtype, row, sign_masks(shape.dim), x)


def _levels(e: Emitter, shape: RowShape, packed: Value, i: int, sizes: list[Value]) -> Value:
    """Vector ``i``: the level that the magnitude bits choose, with its sign."""
    first = i * e.lanes
    masks = [e.load_mask(packed, k * shape.dim + first) for k in range(shape.num_bits)]
    for mask in masks[:-1]:
        pairs = zip(sizes[::2], sizes[1::2], strict=True)
        sizes = [e.builder.select(mask, high, low) for low, high in pairs]
    signs = e.builder.select(masks[-1], e.all_words(SIGN_BIT), e.all_words(0))
    return e.flip(sizes[0], signs)
