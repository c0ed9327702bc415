"""Exact products of small integers, with the best instruction that the host has for them.

A tile is a few tokens by a few vectors of columns; its sums stay in registers. Factors lie in
*groups* of 32 bits: four bytes where the host has a dot product of bytes (VNNI, ARM's sdot), else
two 16-bit words. Sums of integers do not depend on their order, so all hosts agree to the last bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils

from kvstore.codecs.kernels.emit.emitter import I8, I16, I32, I64, Emitter, Value, host_features

# (emitter, sums, groups of one token in all lanes, groups of the columns) -> sums
Dot: TypeAlias = Callable[[Emitter, Value, Value, Value], Value]


@dataclass(frozen=True)
class HostVectors:
    """The vectors and dot products of this machine; they stay the same while a process lives."""

    lanes: int  # 32-bit integers in a vector
    tile_vectors: int  # vectors of columns in a tile
    bytes_dot: str  # "vnni", "sdot", or empty if the host has none
    words_dot: str  # "vnni", "madd", or empty if the host has none

    @property
    def group(self) -> int:
        """Components in a group when unpacking: bytes if the host has a dot product of bytes."""
        return 4 if self.bytes_dot else 2

    @property
    def offset(self) -> int:
        """A number added to levels, because VNNI multiplies unsigned bytes by signed ones."""
        return 128 if self.bytes_dot == "vnni" else 0

    @property
    def tile_tokens(self) -> int:
        """The tokens of a tile."""
        return 8 if self.lanes == 16 else 4

    @property
    def tile_columns(self) -> int:
        """The columns of a tile."""
        return self.lanes * self.tile_vectors


@functools.cache
def host_vectors() -> HostVectors:
    """Choose the vectors and instructions by the features of this machine."""
    features = host_features()
    if "avx512bw" in features:
        vnni = "vnni" if "avx512vnni" in features else ""
        return HostVectors(16, 2, vnni, vnni or "madd")
    if "avx2" in features:
        vnni = "vnni" if "avxvnni" in features else ""
        return HostVectors(8, 2, vnni, vnni or "madd")
    return HostVectors(4, 4, "sdot" if "dotprod" in features else "", "")


class Tile:
    """Sums of products for some tokens by some vectors of columns, in registers."""

    def __init__(self, e: Emitter, tokens: int, vectors: int) -> None:
        self.e = e
        self.sums = [[e.variable(e.words) for _ in range(vectors)] for _ in range(tokens)]

    def begin(self, address: Value) -> None:
        """Set the sums of all tokens to the words at ``address``."""
        for k in range(len(self.sums[0])):
            first = self.e.load(address, 4 * self.e.lanes * k, self.e.words)
            for row in self.sums:
                self.e.builder.store(first, row[k])

    def load(self, address: Value, step: Value) -> None:
        """Load the sums, ``step`` bytes from one token's to the next's."""
        for row in self.sums:
            for k, total in enumerate(row):
                found = self.e.load(address, 4 * self.e.lanes * k, self.e.words)
                self.e.builder.store(found, total)
            address = self.e.builder.add(address, step)

    def change(self, vector: int, by: Any) -> None:
        """Replace the sums of some columns by ``by(sums)``."""
        for row in self.sums:
            self.e.builder.store(by(self.e.builder.load(row[vector])), row[vector])

    def add(self, dot: Dot, *args: Value) -> None:
        """Add products.

        ``args``: addresses of the first token's first group and of the columns' first groups;
        number of groups; bytes from one group to the next of a token and of a column.
        """
        source, matrix, count, source_step, matrix_step = args
        e, b = self.e, self.e.builder
        with cgutils.for_range(b, count) as loop:
            at = b.add(source, b.mul(loop.index, source_step))
            columns = b.add(matrix, b.mul(loop.index, matrix_step))
            known = [e.load(columns, 4 * e.lanes * k, e.words) for k in range(len(self.sums[0]))]
            for token, row in enumerate(self.sums):
                groups = e.splat_word(e.load(at, 4 * token, I32))
                for total, column_groups in zip(row, known, strict=True):
                    b.store(dot(e, b.load(total), groups, column_groups), total)

    def store(self, address: Value, step: Value) -> None:
        """Store the sums, ``step`` bytes from one token's to the next's."""
        for row in self.sums:
            for k, total in enumerate(row):
                self.e.store(self.e.builder.load(total), address, 4 * self.e.lanes * k)
            address = self.e.builder.add(address, step)


def emit_tile(b: Any, dot: Dot, args: tuple[Value, ...]) -> None:
    """Emit sums of products for the tokens and columns of a tile of this host, to memory.

    ``args``: addresses of the first token's first group, of the columns' first groups, of the sums'
    initial values and of the results; number of groups; bytes from one group to the next of a token
    and of a column; bytes from one token's results to the next's.
    """
    source, matrix, begin, target, count, source_step, matrix_step, target_step = args
    host = host_vectors()
    tile = Tile(Emitter(b, host.lanes), host.tile_tokens, host.tile_vectors)
    tile.begin(begin)
    tile.add(dot, source, matrix, count, source_step, matrix_step)
    tile.store(target, target_step)


def dot_of_bytes(e: Emitter, sums: Value, tokens: Value, columns: Value) -> Value:
    """Add products of groups of four bytes to ``sums``; the host has an instruction for it."""
    if host_vectors().bytes_dot == "vnni":
        return e.call(f"llvm.x86.avx512.vpdpbusd.{32 * e.lanes}", e.words, sums, tokens, columns)
    pair = [e.builder.bitcast(x, ir.VectorType(I8, 16)) for x in (tokens, columns)]
    return e.call("llvm.aarch64.neon.sdot.v4i32.v16i8", e.words, sums, *pair)


def dot_of_words(e: Emitter, sums: Value, tokens: Value, columns: Value) -> Value:
    """Add products of groups of two 16-bit words to ``sums``, on any host."""
    kind = host_vectors().words_dot
    if kind == "vnni":
        return e.call(f"llvm.x86.avx512.vpdpwssd.{32 * e.lanes}", e.words, sums, tokens, columns)
    if kind == "madd":
        halves = ir.VectorType(I16, 2 * e.lanes)
        name = "llvm.x86.avx512.pmaddw.d.512" if e.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
        pair = [e.builder.bitcast(x, halves) for x in (tokens, columns)]
        return e.builder.add(sums, e.call(name, e.words, *pair))
    b, half = e.builder, e.all_words(16)
    low = b.mul(*(b.ashr(b.shl(x, half), half) for x in (tokens, columns)))
    high = b.mul(*(b.ashr(x, half) for x in (tokens, columns)))
    return b.add(b.add(sums, low), high)


def dot_of_levels(e: Emitter, sums: Value, tokens: Value, columns: Value) -> Value:
    """Add products of groups, of bytes if the host has an instruction for these, to ``sums``."""
    dot = dot_of_bytes if host_vectors().group == 4 else dot_of_words
    return dot(e, sums, tokens, columns)


def emit_levels(b: Any, bits: int, offset: int, args: tuple[Value, ...]) -> None:
    """Emit code that converts codes to bytes: 64 for each component, each a level plus ``offset``.

    ``bits``: planes of a code.

    ``args``: address of the lowest plane and bytes to the next; address of the first component's
    magnitudes, a byte each, and bytes to the next component's; address of the first row of 64
    bytes; number of components. A bit set in the highest plane means that the level is positive.
    """
    source, step, table, table_step, target, count = args
    with cgutils.for_range(b, count) as loop:
        planes = b.mul(b.mul(loop.index, ir.Constant(I64, bits)), step)
        levels = b.add(table, b.mul(loop.index, table_step))
        row = b.add(target, b.mul(loop.index, ir.Constant(I64, 64)))
        _emit_component(Emitter(b, 16), bits, offset, (b.add(source, planes), step, levels, row))


def _emit_component(e: Emitter, bits: int, offset: int, args: tuple[Value, ...]) -> None:
    source, step, table, target = args
    b = e.builder
    planes = [e.load(b.add(source, b.mul(step, ir.Constant(I64, k))), 0, I64) for k in range(bits)]
    lanes = ir.VectorType(I8, 64)
    levels = [e.filled(e.load(table, k, I8), lanes) for k in range(1 << (bits - 1))]
    mask_type = ir.VectorType(ir.IntType(1), 64)
    for plane in planes[:-1]:
        mask = b.bitcast(b.not_(b.xor(plane, planes[-1])), mask_type)
        pairs = zip(levels[::2], levels[1::2], strict=True)
        levels = [b.select(mask, high, low) for low, high in pairs]
    negative = b.sub(ir.Constant(lanes, None), levels[0])
    signed = b.select(b.bitcast(planes[-1], mask_type), levels[0], negative)
    if offset:
        signed = b.xor(signed, ir.Constant(lanes, [ir.Constant(I8, offset)] * 64))
    e.store(signed, target, 0)


def emit_groups(b: Any, group: int, args: tuple[Value, ...]) -> None:
    """Emit code that joins every ``group`` rows of 64 bytes into 64 groups, one for each token.

    ``args``: addresses of the rows and of the groups, number of groups.
    """
    source, target, count = args
    with cgutils.for_range(b, count) as loop:
        rows = b.mul(loop.index, ir.Constant(I64, 64 * group))
        groups = b.mul(loop.index, ir.Constant(I64, 256))
        _emit_group(Emitter(b, 16), group, b.add(source, rows), b.add(target, groups))


def _emit_group(e: Emitter, group: int, source: Value, target: Value) -> None:
    b = e.builder
    rows = [e.load(source, 64 * k, ir.VectorType(I8, 64)) for k in range(group)]
    if group == 2:
        rows = [b.sext(row, ir.VectorType(I16, 64)) for row in rows]
        vectors = e.zipped(rows[0], rows[1])
    else:
        low = [b.bitcast(x, ir.VectorType(I16, 32)) for x in e.zipped(rows[0], rows[1])]
        high = [b.bitcast(x, ir.VectorType(I16, 32)) for x in e.zipped(rows[2], rows[3])]
        vectors = [x for pair in zip(low, high, strict=True) for x in e.zipped(*pair)]
    for number, vector in enumerate(vectors):
        e.store(vector, target, number * (256 // len(vectors)))
