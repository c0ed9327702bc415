"""Packed rows of one side, as attention takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvstore.codecs.attention.planes import AttendedStack, attended_stack, can_attend
from kvstore.codecs.attention.rotated import ReferenceAttention, row_attention
from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.floats import widen
from kvstore.codecs.reader import Reader
from kvstore.codecs.rows.backend import reference_kernel
from kvstore.codecs.rows.payload import KEPT_DTYPE
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.shapes import KVLayout
from thermocline.packed import Packed, row_arrays
from thermocline.padded import claimed_layout


class KeptToken(NamedTuple):
    """A row that is kept as it is, and its place."""

    head: int
    token: int
    values: np.ndarray  # fp32 (dim,)


class AttendedRows(Protocol):
    """The parts of packed rows. ``dim``: values of a row, zeros that were added included."""

    dim: int
    first_tokens: np.ndarray  # fp32 (heads, up to 4, values of a row without those zeros)
    kept: Sequence[KeptToken]

    def products(self, query: np.ndarray, out: np.ndarray, exact: bool) -> None:
        """Writes products with the tokens after the first ones to ``out``; see ``Method.scores``.

        ``query``: fp32 (heads, queries, dim). ``out``: fp32 (heads, queries, tokens). Kept rows
        count as zero.
        """

    def sums(self, weights: np.ndarray) -> np.ndarray:
        """Returns weighted sums of the tokens after the first ones, fp32 (heads, queries, dim)."""


def attended_rows(codec: object, packed: Packed) -> AttendedRows | None:
    """Returns the parts of rows of one side; None where they have to be restored first."""
    if not packed.num_tokens:
        return _NoRows(packed)
    if isinstance(codec, RowCodec) and isinstance(codec.rows, RotatedRows):
        return _Rotated(codec, codec.rows, packed)
    if isinstance(codec, StackCodec):
        num_tokens, first = packed.num_tokens, packed.first_token
        wide = claimed_layout(codec, packed.layout, num_tokens, first, packed.nbytes)
        (pipeline,) = codec.assemble(wide)
        if can_attend(pipeline):
            assert isinstance(pipeline, Pipeline)
            return _Stacked(pipeline, wide, packed)
    return None


class _NoRows:
    """Rows of no token, which have no payload that could bound the layout: nothing is built.

    Implements ``AttendedRows``.
    """

    def __init__(self, packed: Packed) -> None:
        heads, self.dim = packed.layout.layers[0].num_kv_heads, _dim_of(packed.layout)
        self.first_tokens = np.empty((heads, 0, self.dim), np.float32)
        self.kept: Sequence[KeptToken] = ()

    def products(self, query: np.ndarray, out: np.ndarray, exact: bool) -> None:
        pass

    def sums(self, weights: np.ndarray) -> np.ndarray:
        return np.zeros((*weights.shape[:2], self.dim), np.float32)


class _Rotated:
    """Rows of ``tq1`` to ``tq8``, by compiled code. Implements ``AttendedRows``."""

    def __init__(self, codec: RowCodec, rows: RotatedRows, packed: Packed) -> None:
        parts, dtype = row_arrays(codec, packed), packed.layout.dtype
        dim = _dim_of(packed.layout)
        first = widen(parts["first_tokens"], dtype)
        self._codes, self._scales = parts["codes"], parts["scales"]
        self.first_tokens = first[:, :, :dim]
        self.dim = first.shape[2]
        self._attention = row_attention(rows, self.dim)
        if codec.backend is reference_kernel:
            self._attention = ReferenceAttention(rows, self.dim)
        heads, tokens = np.nonzero(self._scales == 0)
        nbytes = len(heads) * self.dim * KEPT_DTYPE.itemsize
        stored = np.frombuffer(packed.payload, KEPT_DTYPE, offset=packed.nbytes - nbytes)
        self.kept: Sequence[KeptToken] = [
            KeptToken(int(head), int(token) + first.shape[1], widen(bits[:dim], dtype))
            for head, token, bits in zip(heads, tokens, stored.reshape(-1, self.dim), strict=True)
        ]

    def products(self, query: np.ndarray, out: np.ndarray, exact: bool) -> None:
        multiply = self._attention.scores if exact else self._attention.near_scores
        multiply(query, self._codes, self._scales, out)

    def sums(self, weights: np.ndarray) -> np.ndarray:
        out = np.zeros((*weights.shape[:2], self.dim), np.float32)
        self._attention.add_weighted(weights, self._codes, self._scales, out)
        return out


class _Stacked:
    """Rows of a pipeline, stage by stage. Implements ``AttendedRows``."""

    def __init__(self, pipeline: Pipeline, wide: KVLayout, packed: Packed) -> None:
        dtype, dim = packed.layout.dtype, _dim_of(packed.layout)
        heads = wide.layers[0].num_kv_heads
        self.dim = pipeline.shape.width
        num_first = min(max(NUM_SINKS - packed.first_token, 0), packed.num_tokens)
        reader = Reader(packed.payload)
        first = reader.take("<u2", heads, num_first, self.dim)
        self.first_tokens = widen(first, dtype)[:, :, :dim]
        self._stack: AttendedStack | None = None
        self.kept: Sequence[KeptToken] = []
        if packed.num_tokens > num_first:
            self._stack = attended_stack(pipeline, reader, packed.num_tokens - num_first)
            self.kept = [
                KeptToken(unit, token + num_first, widen(bits[:dim], dtype))
                for unit, token, bits in self._stack.kept
            ]

    def products(self, query: np.ndarray, out: np.ndarray, exact: bool) -> None:
        if self._stack is not None:
            out[...] = self._stack.source.products(query)

    def sums(self, weights: np.ndarray) -> np.ndarray:
        if self._stack is None:
            return np.zeros((*weights.shape[:2], self.dim), np.float32)
        return self._stack.source.sums(weights)


def _dim_of(layout: KVLayout) -> int:
    (dim,) = (x for y in layout.layers for x in (y.head_dim, y.value_dim) if x)
    return dim
