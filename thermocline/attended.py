"""Attention on packed rows: products with queries and weighted sums, without restoring the rows."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.floats import widen
from kvstore.codecs.rows.attention import ReferenceAttention, row_attention
from kvstore.codecs.rows.backend import reference_kernel
from kvstore.codecs.rows.payload import KEPT_DTYPE
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_codec import RowCodec
from thermocline.packed import Packed, row_arrays


class PackedRows:
    """The keys or the values of some heads of one layer, packed by ``tq1`` to ``tq8``.

    A payload has three kinds of rows: those of a session's first tokens, in 16 bits; packed rows;
    and, at its end, the exact values of rows that cannot be packed, whose scale is stored as zero.
    """

    def __init__(self, codec: RowCodec, rows: RotatedRows, packed: Packed) -> None:
        parts, dtype = row_arrays(codec, packed), packed.layout.dtype
        (layer,) = packed.layout.layers
        self._dim = layer.head_dim or layer.value_dim
        first = widen(parts["first_tokens"], dtype)
        self._codes, self._scales = parts["codes"], parts["scales"]
        self._first = first[:, :, : self._dim]
        self._width = first.shape[2]  # with the zeros that were added to a row
        is_numpy = codec.backend is reference_kernel
        make = ReferenceAttention if is_numpy else row_attention
        self._attention = make(rows, self._width)
        heads, tokens = np.nonzero(self._scales == 0)
        nbytes = len(heads) * self._width * KEPT_DTYPE.itemsize
        stored = np.frombuffer(packed.payload, KEPT_DTYPE, offset=packed.nbytes - nbytes)
        kept = widen(stored.reshape(-1, self._width)[:, : self._dim], dtype)
        places = zip(heads.tolist(), (tokens + first.shape[1]).tolist(), kept, strict=True)
        self._kept = list(places)  # (head, token, values) of each row that cannot be packed

    def products(self, query: np.ndarray) -> np.ndarray:
        """Return the products of queries with all rows, fp32 (heads, queries, tokens).

        ``query``: fp32 (heads, queries, dim).
        """
        num_first = self._first.shape[1]
        num_tokens = num_first + self._scales.shape[1]
        out = np.empty((*query.shape[:2], num_tokens), np.float32)
        out[:, :, :num_first] = np.matmul(query, self._first.swapaxes(1, 2))
        wide = np.zeros((*query.shape[:2], self._width), np.float32)
        wide[:, :, : self._dim] = query
        self._attention.scores(wide, self._codes, self._scales, out[:, :, num_first:])
        for head, token, values in self._kept:
            out[head, :, token] = query[head] @ values
        return out

    def sums(self, weights: np.ndarray) -> np.ndarray:
        """Return the sums of all rows by weight, fp32 (heads, queries, dim).

        ``weights``: (heads, queries, tokens).
        """
        num_first = self._first.shape[1]
        of_packed = np.array(weights[:, :, num_first:], np.float32, order="C")
        for head, token, _ in self._kept:
            of_packed[head, :, token - num_first] = 0
        wide = np.zeros((*weights.shape[:2], self._width), np.float32)
        self._attention.add_weighted(of_packed, self._codes, self._scales, wide)
        total: np.ndarray = wide[:, :, : self._dim]
        total += np.matmul(weights[:, :, :num_first], self._first)
        for head, token, values in self._kept:
            total[head] += weights[head, :, token, None] * values
        return total
