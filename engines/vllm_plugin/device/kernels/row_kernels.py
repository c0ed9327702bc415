"""Triton kernels for ``RotatedRows`` on vLLM's paged cache: gather and pack, unpack and scatter.

One launch handles all sides (K and V of all layers) of one shape for a few consecutive chunks: the
grid is (rows of a chunk, sides, chunks). Rows come head by head, token by token, in the order of a
payload (``kvstore.codecs.rows.payload``), so a kernel's output *is* the payload. The payload of the
next chunk begins ``s_payload`` bytes later. The arithmetic is that of
``kvstore.codecs.rows.rotated_rows``, operation by operation, so the bytes are the same as on a CPU.

Every layer is an allocation of its own, so ``sides`` holds the start of each side, in elements from
``cache``; ``offsets`` holds its position in the payload. A block with an id below zero is neither
read nor written.

The rules that keep the bytes the same are in ``paged_rows``; the rotation consists of butterflies
of whole numbers, which are exact in fp32 in any order.

Packed head dimensions are powers of two from 32 to 256; the host packs all others. Plain copies
handle rows of any multiple of eight elements.
"""

import triton
import triton.language as tl

from engines.vllm_plugin.device.kernels.paged_rows import (
    ALIGNED,
    VARYING,
    halve,
    narrowed,
    nearest,
    plane,
    row_starts,
    widened,
)


@triton.jit
def _butterfly(z, R: tl.constexpr, D: tl.constexpr, H: tl.constexpr):
    pairs = tl.permute(tl.reshape(z, (R, D // (2 * H), 2, H)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (R, D))


@triton.jit
def _butterflies(z, R: tl.constexpr, D: tl.constexpr):
    z = _butterfly(z, R, D, 1)
    z = _butterfly(z, R, D, 2)
    z = _butterfly(z, R, D, 4)
    z = _butterfly(z, R, D, 8)
    z = _butterfly(z, R, D, 16)
    if D >= 64:
        z = _butterfly(z, R, D, 32)
    if D >= 128:
        z = _butterfly(z, R, D, 64)
    if D >= 256:
        z = _butterfly(z, R, D, 128)
    return z


@triton.jit
def _norms(x, R: tl.constexpr, D: tl.constexpr):
    even, odd = tl.split(tl.reshape(x * x, (R, D // 2, 2)))
    a = even + odd
    if D >= 256:
        a = halve(a, R, 128)
    if D >= 128:
        a = halve(a, R, 64)
    if D >= 64:
        a = halve(a, R, 32)
    a = halve(a, R, 16)
    a = halve(a, R, 8)
    a = halve(a, R, 4)
    a = halve(a, R, 2)
    return tl.sqrt_rn(tl.reshape(a, (R,)))


@triton.jit
def _row_starts(
    row, ok, sides, blocks, first_token, num_tokens, block_tokens, s_block, s_head, s_token
):
    """Return ``row_starts`` of rows ``head * num_tokens + token`` of this program's chunk."""
    first = first_token + tl.program_id(2) * num_tokens
    return row_starts(
        row // num_tokens, first + row % num_tokens, ok, sides, tl.program_id(1), blocks,
        block_tokens, s_block, s_head, s_token,
    )  # fmt: skip


@triton.jit
def _rows_and_scales(payload, payload16, s_payload, offsets):
    """Return pointers to this side's packed rows and scales; scales count in units of two bytes."""
    pair = offsets + 2 * tl.program_id(1)
    at = tl.program_id(2).to(tl.int64) * s_payload
    return payload + at + tl.load(pair), payload16 + at // 2 + tl.load(pair + 1)


@triton.jit
def _factors(norm, SIZE: tl.constexpr):
    divisor = tl.where(norm > 0, norm, 1.0)  # a row of zeros is kept as it is
    bits = tl.div_rn(tl.full(norm.shape, SIZE, tl.float32), divisor).to(tl.uint32, bitcast=True)
    return ((bits >> 12) << 12).to(tl.float32, bitcast=True)


@triton.jit
def _above(size, bounds, k: tl.constexpr):
    return tl.where(size >= tl.load(bounds + k), 1.0, 0.0)


@triton.jit
def _energy(total, count, squares, level: tl.constexpr):
    return total + tl.sum((count == level).to(tl.int32), 1) * tl.load(squares + level)


@triton.jit
def _fp16_scale(scale):
    """Round to fp16, nearest even, by integers; zero for a result that is no normal fp16."""
    bits = scale.to(tl.uint32, bitcast=True)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) - 114688
    normal = (rounded - 1024).to(tl.uint32) < 30720
    return tl.where(normal, rounded, 0).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit(do_not_specialize=VARYING)
def pack_kernel(
    cache, sides, blocks, num_rows, first_token, num_tokens, block_tokens, s_block, s_head, s_token,
    payload, payload16, s_payload, offsets, signs, bounds, squares,
    R: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, FP16: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    ok = row < num_rows
    d = tl.arange(0, D)
    start, wanted = _row_starts(
        row, ok, sides, blocks, first_token, num_tokens, block_tokens, s_block, s_head, s_token
    )
    raw = tl.load(cache + start[:, None] + d[None, :], mask=wanted[:, None], other=0)
    x = widened(raw, FP16)
    x = x * tl.load(signs + d)[None, :]
    if not FP16:  # fp16 has no numbers this small
        x = tl.where(tl.abs(x) < 1.0842021724855044e-19, 0.0, x)  # 2^-63
    norm = _norms(x, R, D)
    whole = nearest(x * _factors(norm, SIZE)[:, None])
    number = tl.floor(_butterflies(whole, R, D) * (64.0 / SIZE)).to(tl.int32)
    negative = (number >> 31) & 1
    size = (number ^ (number >> 31)).to(tl.float32)
    count = _above(size, bounds, 0) + _above(size, bounds, 1) + _above(size, bounds, 2)
    if BITS == 4:
        count += _above(size, bounds, 3) + _above(size, bounds, 4)
        count += _above(size, bounds, 5) + _above(size, bounds, 6)
    count = count.to(tl.int32)  # summed as floats: LLVM would put vectors of integers in memory
    total = _energy(tl.zeros((R,), tl.int32), count, squares, 0)
    total = _energy(total, count, squares, 1)
    total = _energy(total, count, squares, 2)
    total = _energy(total, count, squares, 3)
    if BITS == 4:
        total = _energy(total, count, squares, 4)
        total = _energy(total, count, squares, 5)
        total = _energy(total, count, squares, 6)
        total = _energy(total, count, squares, 7)
    length = tl.sqrt_rn(total.to(tl.float32)) * 0.015625  # levels are whole 64ths
    scale = tl.div_rn(norm, length)
    P: tl.constexpr = D // 8
    planes, scales = _rows_and_scales(payload, payload16, s_payload, offsets)
    out = planes + row[:, None].to(tl.int64) * (BITS * P) + tl.arange(0, P)[None, :]
    keep = ok[:, None] & (tl.arange(0, P)[None, :] >= 0)
    tl.store(out, plane(count & 1, R, D), mask=keep)
    tl.store(out + P, plane((count >> 1) & 1, R, D), mask=keep)
    if BITS == 4:
        tl.store(out + 2 * P, plane((count >> 2) & 1, R, D), mask=keep)
    tl.store(out + (BITS - 1) * P, plane(negative, R, D), mask=keep)
    tl.store(scales + row, _fp16_scale(scale), mask=ok)


@triton.jit
def _bits(source, keep, plane: tl.constexpr, P: tl.constexpr, shift):
    return (tl.load(source + plane * P, mask=keep, other=0).to(tl.int32) >> shift) & 1


@triton.jit(do_not_specialize=VARYING)
def unpack_kernel(
    cache, sides, blocks, num_rows, first_token, num_tokens, block_tokens, s_block, s_head, s_token,
    payload, payload16, s_payload, offsets, signs, levels, unit,
    R: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, FP16: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    ok = row < num_rows
    d = tl.arange(0, D)
    P: tl.constexpr = D // 8
    planes, scales = _rows_and_scales(payload, payload16, s_payload, offsets)
    source = planes + row[:, None].to(tl.int64) * (BITS * P) + (d // 8)[None, :]
    keep = ok[:, None] & (d[None, :] >= 0)
    shift = (d % 8)[None, :]
    count = _bits(source, keep, 0, P, shift) + 2 * _bits(source, keep, 1, P, shift)
    if BITS == 4:
        count += 4 * _bits(source, keep, 2, P, shift)
    negative = _bits(source, keep, BITS - 1, P, shift)
    stored = tl.load(scales + row, mask=ok, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
    scale = ((stored + 114688) << 13).to(tl.float32, bitcast=True) * tl.load(unit)
    level = tl.load(levels + count)
    z = _butterflies(tl.where(negative != 0, -level, level), R, D)
    z = (z * scale[:, None]) * tl.load(signs + d)[None, :]
    value = narrowed(z, FP16)
    start, wanted = _row_starts(
        row, ok, sides, blocks, first_token, num_tokens, block_tokens, s_block, s_head, s_token
    )
    # A scale of zero marks a kept row, which ``RowPayloadLayout`` writes.
    write = keep & (wanted & (stored != 0))[:, None]
    tl.store(cache + start[:, None] + d[None, :], value, mask=write)


@triton.jit(do_not_specialize=VARYING)
def gather_kernel(
    cache, sides, blocks, num_rows, first_token, num_tokens, block_tokens, s_block, s_head, s_token,
    out, offsets, D,
    R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Copy rows of ``D`` elements of any type out of blocks; W: the next power of two from D on."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    ok = row < num_rows
    start, wanted = _row_starts(
        row, ok, sides, blocks, first_token, num_tokens, block_tokens, s_block, s_head, s_token
    )
    d = tl.arange(0, W)[None, :]
    mask = wanted[:, None] & (d < D)
    values = tl.load(cache + start[:, None] + d, mask=mask, other=0)
    target = tl.multiple_of(tl.load(offsets + tl.program_id(1)) + row.to(tl.int64) * D, ALIGNED)
    tl.store(out + target[:, None] + d, values, mask=mask)


@triton.jit(do_not_specialize=VARYING)
def scatter_kernel(
    cache, sides, blocks, num_rows, first_token, num_tokens, block_tokens, s_block, s_head, s_token,
    source, offsets, D,
    R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Copy rows of ``D`` elements into blocks; the inverse of ``gather_kernel``."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    ok = row < num_rows
    start, wanted = _row_starts(
        row, ok, sides, blocks, first_token, num_tokens, block_tokens, s_block, s_head, s_token
    )
    d = tl.arange(0, W)[None, :]
    mask = wanted[:, None] & (d < D)
    origin = tl.multiple_of(tl.load(offsets + tl.program_id(1)) + row.to(tl.int64) * D, ALIGNED)
    values = tl.load(source + origin[:, None] + d, mask=mask, other=0)
    tl.store(cache + start[:, None] + d, values, mask=mask)
