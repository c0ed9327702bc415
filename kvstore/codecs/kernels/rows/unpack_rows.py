"""Emits the unpacking of rows; the counterpart of ``rows.rotated_rows``."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from kvstore.codecs import floats
from kvstore.codecs.kernels.emit.dtypes import store_natural, store_row
from kvstore.codecs.kernels.emit.emitter import (
    F32,
    I8,
    I16,
    I32,
    I64,
    Emitter,
    Value,
    f32,
    host_features,
    in_turn,
    log2,
    look_up,
)
from kvstore.codecs.kernels.rows import rotation
from kvstore.codecs.kernels.rows.row_shape import RowShape
from kvstore.codecs.rows.rotation import sign_masks

# Layouts of 64 elements, from planes or from pairs to the layout that ``_natural_sums`` needs; see
# ``pack_rows``.
FROM_PLANES = [
    *((5, 4, 3, 2, 1, 0), (2, 4, 3, 1, 0, 5), (1, 4, 3, 0, 5, 2)),
    *((0, 4, 3, 5, 2, 1), (3, 4, 0, 5, 2, 1), (4, 3, 2, 1, 0, 5)),
]
FROM_PAIRS = [
    *((3, 5, 4, 2, 1, 0), (2, 5, 4, 1, 0, 3), (1, 5, 4, 0, 3, 2)),
    *((0, 5, 4, 3, 2, 1), (4, 3, 2, 1, 0, 5)),
]


def emit_unpack(e: Emitter, shape: RowShape, packed: Value, scale: Value, row: Value) -> None:
    """Emit the unpacking of one row from ``packed`` and ``scale`` to ``row``, all addresses."""
    bits = e.builder.zext(e.load(scale, 0, I16), I32)
    size = e.builder.shl(e.builder.add(bits, ir.Constant(I32, floats.REBIAS)), ir.Constant(I32, 13))
    unit = e.splat(e.builder.fmul(e.builder.bitcast(size, F32), f32(shape.rows.unit_of(shape.dim))))
    if shape.is_mixed:
        sums, store = _mixed_sums(e, shape, packed), store_row
    elif shape.fits_16_bits and shape.wide_lanes > e.lanes:
        sums, store = _natural_sums(e, shape, packed), store_natural
    else:
        sums, store = _split_sums(e, shape, packed), store_row
    x = [e.builder.fmul(e.builder.sitofp(v, e.floats), unit) for v in sums]
    store(e, shape.dtype, row, sign_masks(shape.dim), x)


def _mixed_sums(e: Emitter, shape: RowShape, packed: Value) -> list[Value]:
    """Return rotated levels in 32 bits, as split vectors of several groups each."""
    wide = Emitter(e.builder, shape.wide_lanes)
    z = [_levels(wide, shape, packed, i, I16) for i in range(shape.dim // wide.lanes)]
    first_bit, sums = (1, _neighbours) if shape.fits_16_bits else (2, _sums_of_four)
    z = rotation.mixed_back(wide, shape.order, z, first_bit)
    return [x for halves in z for x in sums(e, halves)]


def _split_sums(e: Emitter, shape: RowShape, packed: Value) -> list[Value]:
    """Return rotated levels in 32 bits, as split vectors."""
    kind = I16 if shape.fits_16_bits else I32
    z = [_levels(e, shape, packed, i, kind) for i in range(shape.dim // e.lanes)]
    *most, last = rotation.exchanged(rotation.natural(e.lanes), range(log2(e.lanes))[::-1])
    z = rotation.add_and_subtract(e, rotation.between_stretches(e, shape.order, z), 1)
    z = rotation.rearranged(e, rotation.through(e, z, most), most[-1], last)
    return rotation.add_and_subtract(e, [e.builder.sext(x, e.words) for x in z], 1)


def _natural_sums(e: Emitter, shape: RowShape, packed: Value) -> list[Value]:
    """Return rotated levels in 32 bits, in natural order, computed in 16 bits and twice the lanes.

    In the last layout, bit 4 distinguishes the two vectors, and bit 5 neighbours, whose sums and
    differences have 32 bits.
    """
    wide, num_stretches = Emitter(e.builder, shape.wide_lanes), shape.dim // 64
    if _has_pairs(shape):
        stretches = [_pairs_of_levels(wide, shape, packed, i) for i in range(num_stretches)]
        z, layouts = [x for pair in stretches for x in pair], FROM_PAIRS
    else:
        z = [_levels(wide, shape, packed, i, I16) for i in range(2 * num_stretches)]
        layouts = FROM_PLANES
    z = rotation.through(wide, rotation.between_stretches(wide, shape.order, z), layouts)
    row = []
    for first, second in zip(z[::2], z[1::2], strict=True):
        pairs = zip(_neighbours(e, first), _neighbours(e, second), strict=True)
        row += [x for pair in pairs for x in pair]
    return row


def _neighbours(e: Emitter, halves: Value) -> list[Value]:
    """Return sums and differences of neighbours, in 32 bits."""
    if "avx512bw" in host_features() and halves.type.count == 32:
        ones = [in_turn(halves.type, 1, sign) for sign in (1, -1)]
        name = "llvm.x86.avx512.pmaddw.d.512"
        return [e.call(name, e.words, halves, x) for x in ones]
    return rotation.add_and_subtract(e, _even_and_odd(e, halves), 1)


def _sums_of_four(e: Emitter, halves: Value) -> list[Value]:
    """Do the last two butterflies, in 32 bits."""
    row = [rotation.butterfly_of_lanes(e, x, 1) for x in _even_and_odd(e, halves)]
    return rotation.add_and_subtract(e, row, 1)


def _even_and_odd(e: Emitter, halves: Value) -> list[Value]:
    b, words, shift = e.builder, e.builder.bitcast(halves, e.words), e.all_words(16)
    return [b.ashr(b.shl(words, shift), shift), b.ashr(words, shift)]


def _has_pairs(shape: RowShape) -> bool:
    """Return whether codes can be looked up in pairs, in a table of 64, and one load gets a row."""
    has_tables = {"avx512vbmi", "gfni"} <= host_features()
    return has_tables and shape.num_bits == 3 and shape.dim <= 128


def _pairs_of_levels(e: Emitter, shape: RowShape, packed: Value, i: int) -> tuple[Value, Value]:
    """Return sums and differences of levels of stretch ``i`` whose numbers differ in bit 3.

    A product of bit matrices gathers six bits of the planes, three for each level, into one byte
    for the lower half of a sum and one for its upper half. The byte is the index of an entry in a
    table of lower or of upper halves.
    """
    bytes_type = ir.VectorType(I8, 64)
    planes = _load_planes(e, packed, shape.num_bits * shape.dim // 8)
    matrices = _bytes([_row_of_bits(shape, i, k // 8, 7 - k % 8) for k in range(64)])
    chosen = e.call("llvm.x86.avx512.permvar.qi.512", bytes_type, planes, matrices)
    bits = _bytes([1 << (4 * (k // 8 % 2) + k % 8 // 2) for k in range(64)])
    product = "llvm.x86.vgf2p8affineqb.512"
    numbers = e.call(product, bytes_type, bits, chosen, ir.Constant(I8, 0))
    numbers = e.builder.or_(numbers, _bytes([64 * (k % 2) for k in range(64)]))
    levels = np.concatenate([shape.rows.levels, -shape.rows.levels])
    first, second = levels[np.arange(64) % 8], levels[np.arange(64) // 8]
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    kind = ir.VectorType(I16, 32)
    pair = []
    for sums in (first + second, first - second):
        low, high = _bytes((sums & 0xFF).tolist()), _bytes((sums >> 8 & 0xFF).tolist())
        pair.append(e.builder.bitcast(e.call(name, bytes_type, low, numbers, high), kind))
    return pair[0], pair[1]


def _row_of_bits(shape: RowShape, stretch: int, word: int, bit: int) -> int:
    """Return the byte of a packed row that holds bit ``bit`` of 8 table indices.

    Byte 63 is past the end of the row and zero.

    ``word``: selects 8 of the 64 table indices, two for each of the four elements from
    ``16 (word // 2) + 4 (word % 2)`` on. The lower three bits of an element's number are the place
    of its bit in the byte.
    """
    if bit >= 2 * shape.num_bits:
        return 63
    plane, is_second = bit % shape.num_bits, bit // shape.num_bits
    return plane * shape.dim // 8 + 8 * stretch + 2 * (word // 2) + is_second


def _load_planes(e: Emitter, packed: Value, nbytes: int) -> Value:
    """Load a packed row, padded with zeros; memory after it is not read."""
    one_bit, lanes = ir.IntType(1), ir.VectorType(I64, 8)
    which = [ir.Constant(one_bit, 8 * k < nbytes) for k in range(lanes.count)]
    mask = ir.Constant(ir.VectorType(one_bit, lanes.count), which)
    address = e.builder.inttoptr(packed, lanes.as_pointer())
    args = (address, ir.Constant(I32, 1), mask, ir.Constant(lanes, None))
    loaded = e.call("llvm.masked.load.v8i64.p0", lanes, *args)
    return e.builder.bitcast(loaded, ir.VectorType(I8, 64))


def _levels(e: Emitter, shape: RowShape, packed: Value, i: int, kind: Value) -> Value:
    """Return vector ``i`` of levels: magnitude bits select a level, the last plane is its sign."""
    first = i * e.lanes
    masks = [e.load_mask(packed, k * shape.dim + first) for k in range(shape.num_bits)]
    level = look_up(e, kind, masks[:-1], shape.rows.levels.tolist())
    return e.builder.select(masks[-1], e.builder.neg(level), level)


def _bytes(values: list[int]) -> Value:
    return in_turn(ir.VectorType(I8, len(values)), *values)
