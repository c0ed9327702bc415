"""Triton kernels for the calibrated fixed rate (``dense3``) on vLLM's paged cache.

``pack_rates_kernel`` gathers rows, removes RoPE, means and gains, multiplies by the unit's basis,
and writes gains and bit planes; ``unpack_rates_kernel`` does the reverse. One launch handles all
sides of one shape for a few consecutive chunks: the grid is (blocks of T tokens of all chunks,
heads, sides), so that a program handles T tokens of one *unit*, a head of a side. The output *is*
the payload; that of the next chunk begins ``s_payload`` bytes later.
``kvstore.codecs.fixed_rate`` is the definition, and the bytes are the same.

- *Products* are of whole numbers. When packing, each 16-bit factor is split into two digits of one
  byte each, so that a product becomes four products of bytes, added up in 32 bits; when restoring,
  factors are bytes. So tensor cores can compute them, and the order of the sums does not matter.
- *Floats* are single IEEE operations in the definition's order. Squares of a row are added in 16
  columns side by side, then halves onto halves. The gain is fitted by sums over components, one
  after the other: products go to ``scratch``, a few kB for each program, and are read back row by
  row.
- *RoPE* combines each channel with its partner: when packing, both are loaded; when restoring, both
  are multiplied out from the same levels. Cosines and sines come from the host.

Tables (``triton_rates``) have C = D components, those without bits last. Pointers to tables of a
unit have shapes (units, magnitudes, C) or (units, C), and (ropes, D) for the rotations.
"""

import triton
import triton.language as tl

from engines.vllm_plugin.device.kernels.paged_rows import (
    VARYING,
    halve,
    narrowed,
    nearest,
    plane,
    row_starts,
    widened,
)

# Offsets differ between layouts, too.
RATES_VARYING = (*VARYING, "pairs_at", "planes_at", "kept_at", "num_angles", "first_angle")
LANES = tl.constexpr(16)  # columns whose squares are added side by side
CODES = tl.constexpr(16)  # number of gains of a unit
INFINITY = tl.constexpr(0x7F800000)  # as the bits of fp32


@triton.jit
def _steps_of(sizes, thresholds):
    """Return the nearest sixteenth of an octave of positive numbers; see ``gain``."""
    bits = sizes.to(tl.int32, bitcast=True)
    steps = 16 * ((bits >> 23) - 127)
    for k in tl.static_range(16):
        steps += ((bits & 0x7FFFFF) > tl.load(thresholds + k)).to(tl.int32)
    return steps


@triton.jit
def _codes_of(steps, ends):
    codes = tl.zeros_like(steps)
    for k in tl.static_range(15):
        codes += (steps > tl.load(ends + k)).to(tl.int32)
    return codes


@triton.jit
def _turns_of(rope, w, partners, columns, angles, half, num_angles, t, ok, D: tl.constexpr):
    """Return partners of channels ``w``, which channels are rotated, and cosines and sines.

    ``t``: the places of the tokens in the table of ``num_angles`` angles.
    """
    partner = tl.load(partners + rope * D + w)
    column = tl.load(columns + rope * D + w)
    turned = column >= 0
    table = angles + tl.maximum(rope - 1, 0) * (2 * num_angles * half)
    at = t[:, None] * half + column[None, :]
    mask = ok[:, None] & turned[None, :]
    cos = tl.load(table + at, mask=mask, other=1.0)
    sin = tl.load(table + num_angles * half + at, mask=mask, other=0.0)
    return partner, turned, cos, sin


@triton.jit
def _centred(
    cache, start, ok, w, mean, rope, partners, columns, angles, half, num_angles, t,
    D: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Load channels ``w`` of rows, rotated back to position zero, without their means."""
    partner, turned, cos, sin = _turns_of(
        rope, w, partners, columns, angles, half, num_angles, t, ok, D
    )
    own = tl.load(
        cache + start[:, None] + w[None, :], mask=ok[:, None] & (w >= 0)[None, :], other=0
    )
    other = tl.load(
        cache + start[:, None] + partner[None, :], mask=ok[:, None] & turned[None, :], other=0
    )
    own, other = widened(own, KIND), widened(other, KIND)
    sin = tl.where((partner > w)[None, :], sin, -sin)
    x = tl.where(turned[None, :], own * cos + other * sin, own)
    return x - tl.load(mean + w)[None, :]


@triton.jit
def _chunk_and_first(num_tokens, T: tl.constexpr):
    """Return this program's chunk, and the first of its tokens in that chunk."""
    blocks = tl.cdiv(num_tokens, T)
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * T


@triton.jit
def _digits(whole):
    """Split 16-bit whole numbers into two of one byte: 256 times the first plus the second."""
    high = (whole + 128) >> 8
    return high.to(tl.int8), (whole - (high << 8)).to(tl.int8)


@triton.jit(do_not_specialize=RATES_VARYING)
def pack_rates_kernel(
    cache, sides, blocks, num_rows, first_token, num_tokens, block_tokens, s_block, s_head, s_token,
    payload, s_payload, pairs_at, planes_at, kept_at,
    first_units, angles, half, num_angles, first_angle, scratch,
    rope_of, partners, columns, means, thresholds, ends, sizes,
    encode_high, encode_low, lives, bits, firsts, bounds, values, rates,
    T: tl.constexpr, D: tl.constexpr, CB: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
    SCALE: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    side, head = tl.program_id(2), tl.program_id(1)
    unit = tl.load(first_units + side) + head
    chunk, first = _chunk_and_first(num_tokens, T)
    payload += chunk.to(tl.int64) * s_payload
    t = first + tl.arange(0, T)
    ok = t < num_tokens
    start, ok = row_starts(
        head, first_token + chunk * num_tokens + t, ok, sides, side, blocks,
        block_tokens, s_block, s_head, s_token,
    )  # fmt: skip
    angle = first_angle + chunk * num_tokens + t
    rope, mean = tl.load(rope_of + unit), means + unit * D
    squares = tl.zeros((T, LANES), tl.float32)
    for at in range(0, D, LANES):
        x = _centred(
            cache, start, ok, at + tl.arange(0, LANES), mean,
            rope, partners, columns, angles, half, num_angles, angle, D, KIND,
        )  # fmt: skip
        squares = squares + x * x
    total = halve(halve(halve(halve(squares, T, 16), T, 8), T, 4), T, 2)
    size = tl.sqrt_rn(tl.reshape(total, (T,)) * SHARE)
    steps, ends, sizes = _steps_of(size, thresholds), ends + unit * CODES, sizes + unit * CODES
    kept = size.to(tl.uint32, bitcast=True) >= INFINITY  # unsigned: a NaN may have its sign set
    kept = kept | (steps > tl.load(ends + CODES - 1))
    gain = tl.where(kept, 1.0, tl.load(sizes + _codes_of(steps, ends)))
    factor = tl.div_rn(tl.full((T,), 1.0, tl.float32), gain) * SCALE
    w = tl.arange(0, D)
    x = _centred(
        cache, start, ok, w, mean, rope, partners, columns, angles, half, num_angles, angle, D, KIND
    )
    x = tl.where((ok & ~kept)[:, None], x * factor[:, None], 0.0)
    high, low = _digits(nearest(x).to(tl.int32))
    high, low = tl.trans(high), tl.trans(low)

    step = (num_tokens + 7) // 8
    eighths = first // 8 + tl.arange(0, T // 8)
    program = (side * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    along_at = scratch + program * (2 * CB * T)
    energy_at = along_at + CB * T
    along, energy = tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32)
    column, row = tl.arange(0, T), tl.arange(0, CB)
    for at in range(0, tl.load(lives + unit), CB):
        c = unit * D + at + row
        e_high = tl.load(encode_high + c[:, None].to(tl.int64) * D + w[None, :])
        e_low = tl.load(encode_low + c[:, None].to(tl.int64) * D + w[None, :])
        number = tl.dot(e_high, high, out_dtype=tl.int32) * 65536
        number += tl.dot(e_high, low, out_dtype=tl.int32) * 256
        number += tl.dot(e_low, high, out_dtype=tl.int32) * 256
        number += tl.dot(e_low, low, out_dtype=tl.int32)
        negative = number < 0
        magnitude = tl.where(negative, -number, number)
        most = tl.load(bits + unit * D + at)  # the components come with most bits first
        table = unit * (K * D) + at + row
        count = tl.zeros((CB, T), tl.int32)
        for k in range((1 << (most - 1)) - 1):
            count += (magnitude > tl.load(bounds + table + k * D)[:, None]).to(tl.int32)
        value = tl.load(values + table[:, None] + count * D)
        exact = magnitude.to(tl.float32) * tl.load(rates + c)[:, None]
        within = row[:, None] * T + column[None, :]
        tl.store(along_at + within, exact * value)
        tl.store(energy_at + within, value * value)
        own_bits = tl.load(bits + c)
        halves = ((1 << own_bits) >> 1)[:, None]
        code = tl.where(negative, halves - 1 - count, halves + count)
        code = tl.where(ok[None, :], code, 0)
        target = payload + planes_at + tl.load(firsts + c).to(tl.int64) * step
        for place in range(most):
            mask = (place < own_bits)[:, None] & (eighths < step)[None, :]
            at_bytes = target[:, None] + place * step + eighths[None, :]
            tl.store(at_bytes, plane((code >> place) & 1, CB, T), mask=mask)
        tl.debug_barrier()  # all of the tile is written
        for k in range(0, CB, 8):
            for i in tl.static_range(8):  # unrolled, so that loads do not wait for sums
                along = along + tl.load(along_at + (k + i) * T + column)
                energy = energy + tl.load(energy_at + (k + i) * T + column)
        tl.debug_barrier()  # all of it is read
    usual = (along > 0) & (energy > 0)
    ratio = tl.div_rn(along, tl.where(usual, energy, 1.0))
    gain = gain * tl.where(usual, tl.minimum(tl.maximum(ratio, 0.5), 2.0), 1.0)
    codes = tl.where(ok, _codes_of(_steps_of(gain, thresholds), ends), 0)
    weights = tl.where(tl.arange(0, 2) == 0, 1, 16)[None, :]
    twos = tl.sum(tl.reshape(codes, (T // 2, 2)) * weights, 1).to(tl.uint8)
    num_pairs, pair = (num_tokens + 1) // 2, first // 2 + tl.arange(0, T // 2)
    tl.store(payload + pairs_at + unit * num_pairs + pair, twos, mask=pair < num_pairs)
    flags = tl.reshape(plane(tl.reshape(kept & ok, (1, T)), 1, T), (T // 8,))
    tl.store(payload + kept_at + unit * step + eighths, flags, mask=eighths < step)


@triton.jit
def _levels(
    planes, step, unit, t, ok, bits, firsts, levels,
    C: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Return the levels of T tokens of a unit, int8 (T, C)."""
    c = tl.arange(0, C)
    own_bits = tl.load(bits + unit * C + c)[None, :]
    source = (
        planes + tl.load(firsts + unit * C + c).to(tl.int64)[None, :] * step + (t // 8)[:, None]
    )
    code = tl.zeros((T, C), tl.int32)
    for place in range(tl.load(bits + unit * C)):
        mask = ok[:, None] & (place < own_bits)
        byte = tl.load(source + place * step, mask=mask, other=0).to(tl.int32)
        code |= ((byte >> (t % 8)[:, None]) & 1) << place
    above = code - ((1 << own_bits) >> 1)
    size = tl.where(above >= 0, above, -1 - above)
    level = tl.load(levels + unit * (K * C) + size * C + c[None, :]).to(tl.int32)
    return tl.where(above >= 0, level, -level).to(tl.int8)


@triton.jit
def _restored(level, matrix, w, gain, mean, C: tl.constexpr):
    """Return channels ``w`` of rows before they are rotated, fp32; the sums are below 2^24."""
    rows = tl.load(matrix + w[:, None] * C + tl.arange(0, C)[None, :])
    sums = tl.dot(level, tl.trans(rows), out_dtype=tl.int32)
    return sums.to(tl.float32) * gain[:, None] + tl.load(mean + w)[None, :]


@triton.jit(do_not_specialize=RATES_VARYING)
def unpack_rates_kernel(
    cache, sides, blocks, num_rows, first_token, num_tokens, block_tokens, s_block, s_head, s_token,
    payload, s_payload, pairs_at, planes_at, first_units, angles, half, num_angles, first_angle,
    rope_of, partners, columns, means, gains,
    decode, bits, firsts, levels,
    T: tl.constexpr, D: tl.constexpr, W: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    side, head = tl.program_id(2), tl.program_id(1)
    unit = tl.load(first_units + side) + head
    chunk, first = _chunk_and_first(num_tokens, T)
    payload += chunk.to(tl.int64) * s_payload
    t = first + tl.arange(0, T)
    ok = t < num_tokens
    start, wanted = row_starts(
        head, first_token + chunk * num_tokens + t, ok, sides, side, blocks,
        block_tokens, s_block, s_head, s_token,
    )  # fmt: skip
    angle = first_angle + chunk * num_tokens + t
    step, num_pairs = (num_tokens + 7) // 8, (num_tokens + 1) // 2
    level = _levels(payload + planes_at, step, unit, t, ok, bits, firsts, levels, D, K, T)
    pair = tl.load(payload + pairs_at + unit * num_pairs + t // 2, mask=ok, other=0).to(tl.int32)
    gain = tl.load(gains + unit * CODES + ((pair >> (4 * (t % 2))) & 15))
    matrix, mean = decode + unit.to(tl.int64) * (D * D), means + unit * D
    rope = tl.load(rope_of + unit)
    for at in range(0, D, W):
        w = at + tl.arange(0, W)
        x = _restored(level, matrix, w, gain, mean, D)
        if rope > 0:
            partner, turned, cos, sin = _turns_of(
                rope, w, partners, columns, angles, half, num_angles, angle, ok, D
            )
            other = _restored(level, matrix, partner, gain, mean, D)
            sin = tl.where((partner > w)[None, :], -sin, sin)
            x = tl.where(turned[None, :], x * cos + other * sin, x)
        tl.store(cache + start[:, None] + w[None, :], narrowed(x, KIND), mask=wanted[:, None])
