"""Emits the lookup of 32-bit words in a small table, by masks that hold the bits of the indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kvstore.codecs.kernels.emit.emitter import I32, I64, Emitter, Value, log2
from kvstore.codecs.kernels.emit.features import host_features

FEW = 4  # words: selecting among so many is not slower than a permutation
SOME = 16  # words: selecting among more is slower than loading one for each lane
PERMUTED = 32  # words that one instruction chooses from, in two vectors


def look_up(e: Emitter, masks: Sequence[Value], table: Sequence[Value]) -> Value:
    """Return a word of ``table`` in each lane: the one whose index has these bits, lowest first.

    ``table``: i32, two to the power of ``len(masks)``; constants if there are more than ``SOME``.
    """
    if len(table) > FEW and e.lanes == 16 and "avx512f" in host_features():
        choices, at = _permuted(e, masks, table), log2(PERMUTED)
    elif len(table) > SOME:
        return _loaded(e, masks, table)
    else:
        choices, at = [e.splat_word(x) for x in table], 0
    for mask in masks[at:]:
        pairs = zip(choices[::2], choices[1::2], strict=True)
        choices = [e.builder.select(mask, high, low) for low, high in pairs]
    return choices[0]


def _permuted(e: Emitter, masks: Sequence[Value], table: Sequence[Value]) -> list[Value]:
    """Return what every ``PERMUTED`` words have at the index that the first masks give."""
    index = _index(e, masks[: log2(PERMUTED)])
    words = (*table, *[table[0]] * (-len(table) % e.lanes))
    parts = [_vector(e, words[k : k + e.lanes]) for k in range(0, len(words), e.lanes)]
    if len(parts) == 1:
        return [e.call("llvm.x86.avx512.permvar.si.512", e.words, parts[0], index)]
    name = "llvm.x86.avx512.vpermi2var.d.512"
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [e.call(name, e.words, low, index, high) for low, high in pairs]


def _loaded(e: Emitter, masks: Sequence[Value], table: Sequence[Value]) -> Value:
    """Return the words by one load for each lane."""
    b = e.builder
    words = ir.Constant(ir.ArrayType(I32, len(table)), list(table))
    utilities: Any = cgutils
    begin = b.ptrtoint(utilities.global_constant(b, "table", words), I64)
    index, lanes = _index(e, masks), []
    for lane in range(e.lanes):
        place = b.zext(b.extract_element(index, ir.Constant(I32, lane)), I64)
        lanes.append(e.load(b.add(begin, b.shl(place, ir.Constant(I64, 2))), 0, I32))
    return _vector(e, lanes)


def _index(e: Emitter, masks: Sequence[Value]) -> Value:
    index = e.all_words(0)
    for bit, mask in enumerate(masks):
        index = e.builder.select(mask, e.builder.or_(index, e.all_words(1 << bit)), index)
    return index


def _vector(e: Emitter, lanes: Sequence[Value]) -> Value:
    found = ir.Constant(e.words, ir.Undefined)
    for lane, word in enumerate(lanes):
        found = e.builder.insert_element(found, word, ir.Constant(I32, lane))
    return found
