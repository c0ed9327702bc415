"""Triton functions for all kernels on vLLM's paged cache: addresses, floats, bit planes.

Rules that keep the bytes the same in the interpreter, on a GPU and in numpy:

- 16-bit values are loaded and stored as integers, and widened and rounded by integer operations:
  Triton's interpreter truncates fp32 to bf16, and multiplies bit patterns instead of bf16 values.
- Sums of floats have a fixed order, by reshapes and splits or by loops; or they add whole numbers,
  which are exact in any order.
- No multiply-add may be fused: launch with ``enable_fp_fusion=False``.
- Stages are unrolled by hand. The interpreter accepts a loop that carries a tensor whose shape
  changes, but the compiler rejects it.
"""

import triton
import triton.language as tl

# Arguments that differ from launch to launch; kernels are not recompiled for them.
VARYING = ("num_rows", "first_token", "num_tokens")
# The starts of sides and payloads, and all strides, are multiples of this many elements, so that
# loads take 16 bytes.
ALIGNED = tl.constexpr(8)
# Kinds of values: what the bits of a cache's elements mean.
BF16, FP16, FP32 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def halve(a, R: tl.constexpr, W: tl.constexpr):
    """Add the second half of each row to the first: (R, W) becomes (R, W // 2)."""
    low, high = tl.split(tl.permute(tl.reshape(a, (R, 2, W // 2)), (0, 2, 1)))
    return low + high


@triton.jit
def plane(mask, R: tl.constexpr, D: tl.constexpr):
    """Pack bits (R, D) into bytes (R, D // 8), the first bit lowest."""
    weights = (1 << tl.arange(0, 8))[None, None, :]
    bits = tl.reshape(mask.to(tl.int32), (R, D // 8, 8))
    return tl.sum(bits * weights, 2).to(tl.uint8)


@triton.jit
def nearest(x):
    """Round numbers up to 2^22 to whole numbers, halves to even, by adding a large number."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rounded_to_bf16(bits):
    """Round the bits of fp32 to those of bf16, nearest even; a NaN stays a NaN."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, (bits >> 16) | 0x40, rounded)


@triton.jit
def widened(raw, KIND: tl.constexpr):
    """Return elements of the cache as fp32; those of an fp32 cache rounded to bf16."""
    if KIND == FP16:
        x = raw.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == FP32:
        bits = rounded_to_bf16(raw.to(tl.uint32, bitcast=True)) << 16
        x = bits.to(tl.float32, bitcast=True)
    else:
        x = (raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def narrowed(x, KIND: tl.constexpr):
    """Round finite fp32 to elements of the cache: fp16 saturates, fp32 is rounded to bf16."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    if KIND == FP16:
        clipped = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        element = clipped.to(tl.float16).to(tl.int16, bitcast=True)
    elif KIND == FP32:
        element = (rounded << 16).to(tl.int32, bitcast=True)
    else:
        element = rounded.to(tl.uint16).to(tl.int16, bitcast=True)
    return element


@triton.jit
def row_starts(
    head, token, ok, sides, side, blocks, block_tokens, s_block, s_head, s_token
):  # fmt: skip
    """Return where rows of a side begin, in elements from ``cache``, and whether they are wanted.

    Rows of a block with an id below zero are not wanted.
    """
    block = tl.load(blocks + token // block_tokens, mask=ok, other=-1)
    within = head.to(tl.int64) * s_head + (token % block_tokens).to(tl.int64) * s_token
    start = tl.load(sides + side) + block * s_block + within
    return tl.multiple_of(start, ALIGNED), ok & (block >= 0)
