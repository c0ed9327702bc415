"""Unpacks and attends to rows with the host's own kernels, where mlx runs on the host as well.

On a CPU mlx's arrays are in the host's memory: numpy views them without a copy, and numba's kernel
is many times faster than the same steps as mlx operations. Its results enter mlx's graph as
constants, so the packed rows, computed in an earlier step, are evaluated first. For attention the
rows stay packed: see ``kvstore.codecs.rows.attention``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache.packed.mx_packer import MlxRowPacker
from engines.mlx_worker.cache.packed.rows import KVSides, PackedSide, RowKind
from kvstore.codecs import floats
from kvstore.codecs.rows.attention import RowShapes, SessionRows, session_attention
from kvstore.codecs.rows.backend import ArrayKernel, best_kernel
from kvstore.codecs.rows.payload import ArraySlot, SlotGroup


class HostRowPacker(MlxRowPacker):
    """A ``RowPacker`` for mlx on a CPU."""

    def __init__(self, kind: RowKind) -> None:
        super().__init__(kind)
        # One writes bit patterns of the stored dtype, the other the same values in fp32.
        self._kernel: ArrayKernel = best_kernel(kind.format, kind.dim, kind.stored)
        self._wide: ArrayKernel = best_kernel(kind.format, kind.dim, "float32")

    def unpack(self, codes: mx.array, scales: mx.array) -> mx.array:
        mx.eval(codes, scales)
        out = np.empty((1, scales.size, self.kind.dim), _numpy_dtype(self.kind))
        self._unpack_into(out, viewed(codes), viewed(scales), self._kernel)
        rows = mx.array(out).reshape(*scales.shape, self.kind.dim)
        return rows if self.kind.stored == "float16" else rows.view(mx.bfloat16)

    def fetch(
        self,
        sides: Sequence[PackedSide | None],
        starts: Sequence[int],
        width: int,
        dtype: mx.Dtype,
    ) -> mx.array:
        """Return the same as ``kv_cache.fetch``, with one copy instead of several.

        It evaluates the graph so far, which frees the KV of the layer before: otherwise the
        unpacked KV of all layers would be in memory at once.
        """
        held = [side for side in sides if side is not None]
        mx.eval([side.arrays for side in held])
        wide = dtype == mx.float32
        kernel = self._wide if wide and self.kind.stored == "bfloat16" else self._kernel
        element = np.dtype(np.float32) if kernel is self._wide else _numpy_dtype(self.kind)
        heads = held[0].recent.shape[1]
        out = np.zeros((len(sides), heads, width, self.kind.dim), element)
        for row, side, start in zip(out, sides, starts, strict=True):
            if side is not None:
                self._fill(row[:, start:], side, kernel)
        whole = mx.array(out)
        return (whole.view(mx.bfloat16) if element == np.uint16 else whole).astype(dtype)

    def _fill(self, out: np.ndarray, side: PackedSide, kernel: ArrayKernel) -> None:
        """Write one session's tokens into ``out``, (num_kv_heads, some, dim), from column 0 on."""
        first = side.sinks.shape[2]
        last = first + side.num_packed
        out[:, :first] = _exact(side.sinks, out.dtype)
        if side.num_packed:
            self._unpack_into(out[:, first:last], viewed(side.codes), viewed(side.scales), kernel)
            heads, tokens = viewed(side.places)[0].T
            out[heads, first + tokens] = _exact(side.kept, out.dtype)
        out[:, last : side.num_tokens] = _exact(side.recent, out.dtype)

    def _unpack_into(
        self, out: np.ndarray, codes: np.ndarray, scales: np.ndarray, kernel: ArrayKernel
    ) -> None:
        """Unpack into ``out``, (num_kv_heads, num_tokens, dim), head by head."""
        payload = np.concatenate([_bytes_of(scales), _bytes_of(codes)])
        kernel.unpack([payload], _group(self.kind, out.shape[0], out.shape[1]), (out,))
        zero = scales.reshape(out.shape[:2]) == 0
        if zero.any():
            out[zero] = 0


def viewed(array: mx.array) -> np.ndarray:
    """Return a read-only view of an array, 16-bit floats as their bit patterns, uint16."""
    view: np.ndarray = np.asarray(bits_of(array))
    return view


def bits_of(array: mx.array) -> mx.array:
    """Return an array that numpy can view: 16-bit floats as their bit patterns, uint16."""
    is_float = array.dtype in (mx.bfloat16, mx.float16)
    return array.view(mx.uint16) if is_float else array


def _exact(array: mx.array, element: np.dtype) -> np.ndarray:
    """Return rows (1, ..., dim) of the stored dtype as ``element``, without axis 0."""
    bits = viewed(array)[0]
    return floats.widen(bits, "bfloat16") if element == np.float32 else bits.view(element)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    flat: np.ndarray = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8)


def _numpy_dtype(kind: RowKind) -> np.dtype:
    return np.dtype(np.float16 if kind.stored == "float16" else np.uint16)


@functools.lru_cache(maxsize=256)
def _group(kind: RowKind, num_heads: int, num_tokens: int) -> SlotGroup:
    """Return the layout of one array for a kernel: all scales, then all codes."""
    slot = ArraySlot(
        num_heads=num_heads,
        num_sinks=0,
        num_tokens=num_tokens,
        dim=kind.dim,
        first_row=0,
        row_nbytes=kind.format.packed_nbytes(kind.dim),
        scale_dtype=kind.format.scale_dtype,
        sinks_at=0,
        scales_at=0,
        packed_at=num_heads * num_tokens * kind.format.scale_dtype.itemsize,
    )
    offsets = np.array([(slot.packed_at, slot.scales_at)], np.int64)
    return SlotGroup(kind.dim, (0,), (slot,), offsets)


def attend(
    sessions: Sequence[KVSides | None],
    kinds: tuple[RowKind, RowKind],
    queries: mx.array,
    scale: float,
) -> mx.array:
    """Return the attention of each session's query to its rows; zeros for one without tokens.

    Args:
        queries: (sessions, num_heads, 1, head_dim), with their position encoding applied.

    Returns:
        (sessions, num_heads, 1, value_dim), in the queries' dtype.
    """
    keys, values = kinds
    given = (queries * scale).astype(mx.float32)
    bits = [[bits_of(x) for side in sides or () for x in side.arrays[:4]] for sides in sessions]
    mx.eval(given, bits)  # in one call, which costs as much as many rows
    shapes = keys.format, keys.dim, values.dim, keys.stored
    out = np.zeros((*given.shape[:2], values.dim), np.float32)
    for query, arrays, target in zip(np.asarray(given)[:, :, 0], bits, out, strict=True):
        if arrays:
            sides = [np.asarray(x)[0] for x in arrays]
            heads = len(sides[0])
            attention = session_attention(RowShapes(*shapes, len(query) // heads))
            attention.attend(
                query.reshape(heads, -1, keys.dim),
                SessionRows(*sides[:4]),
                SessionRows(*sides[4:]),
                target.reshape(heads, -1, values.dim),
            )
    return mx.array(out)[:, :, None].astype(queries.dtype)
