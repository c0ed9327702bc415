"""Emits the few operations on vectors that rows need, as LLVM IR, for this host's instructions.

All arithmetic is plain IEEE: no fast-math flag is ever set, so LLVM may neither reorder nor fuse.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import cgutils

F32, I8, I16, I32, I64 = (ir.FloatType(), *(ir.IntType(n) for n in (8, 16, 32, 64)))
SIGN_BIT = 1 << 31
Value = Any  # an llvmlite value; the library has no type annotations
FEW = 4  # words: selecting among so many is not slower than a permutation
SOME = 16  # words: selecting among more is slower than loading one for each lane
MAX_LANES = 16  # of 32 bits


@functools.cache
def host_features() -> Set[str]:
    """The features of this machine, without those that ``NUMBA_CPU_FEATURES`` disables.

    numba compiles for these features only. Empty if they are not known.
    """
    if os.environ.get("NUMBA_CPU_NAME"):  # code for another processor, whose features are not known
        return set()
    found = features_of_arm(platform.machine(), llvm.get_host_cpu_name())
    with suppress(RuntimeError):  # not every system reports them
        found |= {name for name, is_there in llvm.get_host_cpu_features().items() if is_there}
    named = os.environ.get("NUMBA_CPU_FEATURES", "").split(",")
    return found - {item[1:] for item in named if item.startswith("-")}


def features_of_arm(machine: str, name: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return ``dotprod`` if an ARM processor has it: LLVM reports it on no system.

    Args:
        machine: as ``platform.machine`` names it.
        name: LLVM's name of the processor. It selects the instruction by the name, so that of a
            processor that it does not know gets none.
        cpuinfo: Linux's account of its processors.
    """
    has_dots = machine == "arm64"  # Apple's, which have it from the M1 on
    if machine == "aarch64":
        with suppress(OSError):
            has_dots = "asimddp" in cpuinfo.read_text().split()
    return {"dotprod"} if has_dots and name != "generic" else set()


class BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bf16, for which llvmlite has no type."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


def f32(value: float | np.float32) -> Value:
    """A float constant, rounded to fp32: llvmlite accepts no others."""
    return ir.Constant(F32, float(np.float32(value)))


def in_turn(kind: Value, *values: int) -> Value:
    """A vector of these integers, repeated until it is full."""
    numbers = values * (kind.count // len(values))
    return ir.Constant(kind, [ir.Constant(kind.element, x) for x in numbers])


def log2(power: int) -> int:
    """Return the exponent of a power of two."""
    return power.bit_length() - 1


class Emitter:
    """Writes operations on vectors of ``lanes`` elements with ``builder``."""

    def __init__(self, builder: Value, lanes: int):
        self.builder = builder
        self.lanes = lanes
        self.floats = ir.VectorType(F32, lanes)
        self.words = ir.VectorType(I32, lanes)

    # ---- memory, at an address and an offset in bytes; nothing has to be aligned

    def load(self, base: Value, offset: int, kind: Value) -> Value:
        """Load a value of LLVM type ``kind``."""
        address = self.builder.add(base, ir.Constant(I64, offset))
        loaded = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        loaded.align = 1
        return loaded

    def store(self, value: Value, base: Value, offset: int) -> None:
        """Store a value of any LLVM type."""
        address = self.builder.add(base, ir.Constant(I64, offset))
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer).align = 1

    def prefetch(self, base: Value, nbytes: int) -> None:
        """Load ``nbytes`` into the first cache; the address need not be valid."""
        kind = ir.IntType(8).as_pointer()
        flags = [ir.Constant(I32, x) for x in (0, 3, 1)]  # for reading, high locality, data cache
        for offset in range(0, nbytes, 64):
            address = self.builder.inttoptr(self.builder.add(base, ir.Constant(I64, offset)), kind)
            self.call("llvm.prefetch.p0", ir.VoidType(), address, *flags)

    def variable(self, kind: Value) -> Value:
        """A variable that a loop may change; LLVM keeps it in a register."""
        utilities: Any = cgutils
        return utilities.alloca_once(self.builder, kind)

    # ---- constants and casts

    def all_words(self, value: int) -> Value:
        """A vector of 32-bit integers, all the same."""
        return self.word_list([value] * self.lanes)

    def word_list(self, values: Iterable[int]) -> Value:
        """A vector of these 32-bit integers, one for each lane."""
        return ir.Constant(self.words, [ir.Constant(I32, int(v)) for v in values])

    def all_floats(self, value: float | np.float32) -> Value:
        """A vector of fp32 numbers, all the same."""
        return ir.Constant(self.floats, [f32(value)] * self.lanes)

    def splat(self, scalar: Value) -> Value:
        """Copy an fp32 number into all lanes."""
        return self.filled(scalar, self.floats)

    def splat_word(self, scalar: Value) -> Value:
        """Copy a 32-bit integer into all lanes."""
        return self.filled(scalar, self.words)

    def filled(self, scalar: Value, kind: Value) -> Value:
        """Copy a number into all elements of a vector of type ``kind``."""
        empty = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(empty, scalar, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, kind.count), None)
        return self.builder.shuffle_vector(first, first, zeros)

    def as_words(self, floats: Value) -> Value:
        """Reinterpret the bits of fp32 numbers as integers."""
        return self.builder.bitcast(floats, self.words)

    def as_floats(self, words: Value) -> Value:
        """Reinterpret the bits of integers as fp32 numbers."""
        return self.builder.bitcast(words, self.floats)

    def zipped(self, first: Value, second: Value) -> list[Value]:
        """Interleave the elements of two vectors of any type and length, into two vectors."""
        count = first.type.count
        pairs = [k for lane in range(count) for k in (lane, count + lane)]
        kind = ir.VectorType(I32, count)
        masks = [in_turn(kind, *half) for half in (pairs[:count], pairs[count:])]
        return [self.builder.shuffle_vector(first, second, mask) for mask in masks]

    def transposed(self, rows: list[Value]) -> list[Value]:
        """Transpose rows, a power of two: the first elements of all, then the second ones, ..."""
        half = len(rows) // 2
        for _ in range(log2(len(rows))):
            pairs = zip(rows[:half], rows[half:], strict=True)
            rows = [x for pair in pairs for x in self.zipped(*pair)]
        return rows

    # ---- arithmetic

    def magnitude(self, floats: Value) -> Value:
        """Clear the sign bits."""
        return self.as_floats(self.builder.and_(self.as_words(floats), self.all_words(0x7FFFFFFF)))

    def flip(self, floats: Value, masks: Value) -> Value:
        """Flip the bits of fp32 numbers that are set in ``masks``: their sign bits."""
        return self.as_floats(self.builder.xor(self.as_words(floats), masks))

    def choose(self, first: Value, second: Value, lanes: Iterable[int]) -> Value:
        """Choose any lanes of two vectors; those of ``second`` count from ``self.lanes``."""
        return self.builder.shuffle_vector(first, second, self.word_list(lanes))

    def multiply_add(self, x: Value, y: Value, addend: Value) -> Value:
        """Compute x * y + addend, fused if the host can.

        Unless the product is exact, the last bit depends on the host.
        """
        return self._call(f"llvm.fmuladd.v{self.lanes}f32", x, y, addend)

    def nearest(self, floats: Value) -> Value:
        """Round to whole numbers, halves to even."""
        return self._call(f"llvm.rint.v{self.lanes}f32", floats)

    def sqrt(self, value: Value) -> Value:
        """Compute square roots of a number or a vector."""
        suffix = f"v{value.type.count}f32" if isinstance(value.type, ir.VectorType) else "f32"
        return self._call(f"llvm.sqrt.{suffix}", value)

    def popcount(self, word: Value) -> Value:
        """Count the set bits of an integer of any width; the count is i32."""
        count = self._call(f"llvm.ctpop.{word.type}", word)
        if word.type.width > 32:
            return self.builder.trunc(count, I32)
        return count if word.type.width == 32 else self.builder.zext(count, I32)

    def _call(self, name: str, *values: Value) -> Value:
        return self.call(name, values[0].type, *values)

    def call(self, name: str, result: Value, *values: Value) -> Value:
        """Call an intrinsic of LLVM."""
        declared = self.builder.module.globals.get(name)
        if declared is None:
            kind = ir.FunctionType(result, [value.type for value in values])
            declared = ir.Function(self.builder.module, kind, name)
        return self.builder.call(declared, values)

    # ---- masks: one bit per lane

    def whole_bytes(self, masks: Sequence[Value]) -> list[Value]:
        """Turn masks into integers of eight bits or more, lowest lane lowest; join short ones."""
        while masks[0].type.count < 8:
            pairs = zip(masks[::2], masks[1::2], strict=True)
            masks = [self._side_by_side(low, high) for low, high in pairs]
        return [self.builder.bitcast(m, ir.IntType(m.type.count)) for m in masks]

    def _side_by_side(self, low: Value, high: Value) -> Value:
        width = 2 * low.type.count
        lanes = ir.Constant(ir.VectorType(I32, width), [ir.Constant(I32, k) for k in range(width)])
        return self.builder.shuffle_vector(low, high, lanes)

    def load_mask(self, base: Value, first_bit: int) -> Value:
        """Load ``lanes`` bits of memory as a mask, beginning with bit ``first_bit``."""
        width = max(self.lanes, 8)
        bits = self.load(base, first_bit // 8, ir.IntType(width))
        mask = self.builder.bitcast(bits, ir.VectorType(ir.IntType(1), width))
        if width == self.lanes:
            return mask
        lanes = range(first_bit % 8, first_bit % 8 + self.lanes)
        return self.builder.shuffle_vector(mask, mask, self.word_list(lanes))


def look_up(e: Emitter, kind: Value, masks: Sequence[Value], table: Sequence[int]) -> Value:
    """Return an integer of ``table`` in each lane: that whose index has these bits, lowest first.

    ``kind``: i32 or i16, whose vectors select twice as fast. ``table``: two to the power of
    ``len(masks)``.
    """
    lanes, halves = ir.VectorType(kind, e.lanes), kind == I16
    if halves and len(table) > 2 * SOME and e.lanes <= MAX_LANES:
        return e.builder.trunc(look_up(e, I32, masks, table), lanes)
    can_permute = {"avx512bw", "avx512vl"} <= host_features()
    if can_permute and len(table) > (2 * SOME if halves else FEW):
        choices, at = _permuted(e, lanes, masks, table), log2(2 * e.lanes)
    elif len(table) > (2 * SOME if halves else SOME):
        return _loaded(e, masks, table)
    else:
        choices, at = [in_turn(lanes, x) for x in table], 0
    for mask in masks[at:]:
        pairs = zip(choices[::2], choices[1::2], strict=True)
        choices = [e.builder.select(mask, high, low) for low, high in pairs]
    return choices[0]


def _permuted(
    e: Emitter, lanes: Value, masks: Sequence[Value], table: Sequence[int]
) -> list[Value]:
    """Return what every two vectors of the table have at the index that the first masks give."""
    index = _index(e, lanes, masks[: log2(2 * e.lanes)])
    whole = (*table, *[0] * (-len(table) % (2 * e.lanes)))
    parts = [in_turn(lanes, *whole[k : k + e.lanes]) for k in range(0, len(whole), e.lanes)]
    width = lanes.element.width
    name = f"llvm.x86.avx512.vpermi2var.{'hi' if width == 16 else 'd'}.{width * e.lanes}"
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [e.call(name, lanes, low, index, high) for low, high in pairs]


def _loaded(e: Emitter, masks: Sequence[Value], table: Sequence[int]) -> Value:
    """Return the words by one load for each lane."""
    b = e.builder
    words = ir.Constant(ir.ArrayType(I32, len(table)), [ir.Constant(I32, x) for x in table])
    utilities: Any = cgutils
    begin = b.ptrtoint(utilities.global_constant(b, "table", words), I64)
    index, found = _index(e, e.words, masks), ir.Constant(e.words, ir.Undefined)
    for lane in (ir.Constant(I32, k) for k in range(e.lanes)):
        place = b.shl(b.zext(b.extract_element(index, lane), I64), ir.Constant(I64, 2))
        found = b.insert_element(found, e.load(b.add(begin, place), 0, I32), lane)
    return found


def _index(e: Emitter, lanes: Value, masks: Sequence[Value]) -> Value:
    index = in_turn(lanes, 0)
    for bit, mask in enumerate(masks):
        index = e.builder.select(mask, e.builder.or_(index, in_turn(lanes, 1 << bit)), index)
    return index
