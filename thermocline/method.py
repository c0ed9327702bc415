"""Methods, which pack rows of KV given as numpy arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from kvstore.codecs.base import Codec, as_codec, check_claim
from kvstore.codecs.floats import to_stored, widen
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.errors import Corrupt, Mismatch
from kvstore.shapes import NUMPY_DTYPES, DType, KVLayer, KVLayout, KVPair, KVRun, tokens_in
from thermocline.attended import PackedRows
from thermocline.packed import Packed, row_arrays
from thermocline.padded import PaddedCodec

Side: TypeAlias = Literal["key", "value"]
SIDES: tuple[Side, ...] = ("key", "value")
CHUNK_TOKENS = 128  # the tokens of the chunk for which ``bits`` counts
PAST_SINKS = 1 << 20  # any position after a session's first four tokens
USUAL_LAYOUT = KVLayout("bfloat16", (KVLayer(1, 128, 128),))


class Method:
    """A codec, one of ``thermocline.codecs()`` or your own, for numpy arrays. Thread-safe.

    Arrays are fp32, fp16, or uint16, which holds the bit patterns of bf16. Rows of any length can
    be packed: where the codec cannot take the length, rows are padded with zeros.
    """

    def __init__(self, codec: Codec) -> None:
        """Raises ``UnknownCodec`` if ``codec`` lacks a member of the protocol ``Codec``."""
        self.codec = as_codec(codec, "the codec of a Method")  # what a server would use
        self._padded = PaddedCodec(codec)

    def __repr__(self) -> str:
        return f"<Method {self.id}>"

    @property
    def id(self) -> str:
        """The method's name with the version of its arithmetic: equal ids give equal bytes."""
        return self.codec.id

    @property
    def exact(self) -> bool:
        """True if restored rows equal the packed ones bit for bit."""
        return self.codec.exact

    def nbytes(self, num_tokens: int, layout: KVLayout, first_token: int = 0) -> int:
        """Return the bytes that ``num_tokens`` take; an estimate if codes are entropy-coded."""
        return self._padded.packed_nbytes(layout, num_tokens, first_token)

    def bits(self, layout: KVLayout = USUAL_LAYOUT) -> float:
        """Return the bits per value of a chunk of 128 tokens, scales and tables included.

        The first four tokens of a session, which stay in 16 bits, are not counted.
        """
        packed = self.nbytes(CHUNK_TOKENS, layout, PAST_SINKS)
        return 8 * packed / (CHUNK_TOKENS * layout.elements_per_token)

    def pack(self, rows: np.ndarray, side: Side = "key", first_token: int = 0) -> Packed:
        """Pack the keys or the values of some heads.

        ``rows``: (heads, tokens, dim). ``first_token`` is the position of the first row's token in
        its session: tokens 0 to 3 stay in 16 bits, since attention depends on them most.

        Raises:
            ValueError: ``rows`` is not an array, has another shape or dtype, or has NaN or
                infinite values (exact methods take these); or ``side`` is unknown.
            UnknownCodec: the method learned all layers of a model; use ``pack_run``.
        """
        layout = _layout_of_rows(rows, side)
        if not self.exact:
            _require_numbers(rows)
        run = [_pair(np.ascontiguousarray(rows), side)]
        return self._packed(run, layout, first_token)

    def pack_run(self, run: KVRun, first_token: int = 0) -> Packed:
        """Pack all layers of a model.

        ``run``: for each layer K and V, (heads, tokens, dim) each. Raises what ``pack`` raises.
        """
        layout = layout_of_run(run)
        if not self.exact:
            for array in (x for pair in run for x in pair):
                _require_numbers(array)
        return self._packed(run, layout, first_token)

    def restore(self, packed: Packed, out: np.ndarray | None = None) -> np.ndarray:
        """Return the rows of a ``pack`` call, with the loss of the method.

        ``out``: the array to write to and return, (heads, tokens, dim) in the dtype of the packed
        rows; None = a new one.

        Raises:
            Mismatch: ``packed`` is of another method, or of ``pack_run``.
            Corrupt: this method cannot have written the payload.
        """
        self._require_own(packed)
        side = _side_of(packed.layout)
        (pair,) = self.restore_run(packed)
        rows = pair[SIDES.index(side)]
        if out is None:
            return rows
        out[...] = rows
        return out

    def restore_run(self, packed: Packed) -> list[KVPair]:
        """Return K and V of each layer of a ``pack_run`` call. Raises what ``restore`` raises."""
        self._require_own(packed)
        layout, num_tokens, first = packed.layout, packed.num_tokens, packed.first_token
        check_claim(self._padded, layout, num_tokens, first, packed.nbytes)
        run = layout.empty(num_tokens)
        if num_tokens:
            self._padded.decode(packed.payload, layout, first, run)
        elif packed.nbytes:
            raise Corrupt(f"{packed.nbytes} bytes of no tokens")
        return run

    def scores(self, query: np.ndarray, packed: Packed) -> np.ndarray:
        """Return the products of queries with packed rows, fp32 (heads, queries, tokens).

        Rows of ``tq1`` to ``tq8`` stay packed: the query is rotated instead of the rows. Rows of
        other methods are restored first. ``query``: fp32 (heads, queries, dim).

        Raises:
            ValueError: the query has another dtype, number of heads or dimension.
            Mismatch, Corrupt: as ``restore``.
        """
        rows, (heads, _, dim) = self._rows_of(packed), _shape_of(packed)
        if query.ndim != 3 or query.shape[::2] != (heads, dim) or query.dtype != np.float32:
            raise ValueError(f"a query of {query.shape}; fp32 ({heads}, queries, {dim}) is wanted")
        if isinstance(rows, PackedRows):
            return rows.products(query)
        return np.asarray(query @ rows.swapaxes(1, 2))

    def weighted_sum(self, weights: np.ndarray, packed: Packed) -> np.ndarray:
        """Return weighted sums of packed rows, fp32 (heads, queries, dim).

        ``weights``: fp32 (heads, queries, tokens). Raises what ``scores`` raises.
        """
        rows, (heads, tokens, _) = self._rows_of(packed), _shape_of(packed)
        if weights.ndim != 3 or weights.shape[::2] != (heads, tokens):
            wanted = f"({heads}, queries, {tokens})"
            raise ValueError(f"weights of {weights.shape}; fp32 {wanted} are wanted")
        return rows.sums(weights) if isinstance(rows, PackedRows) else np.asarray(weights @ rows)

    def _rows_of(self, packed: Packed) -> PackedRows | np.ndarray:
        self._require_own(packed)
        _side_of(packed.layout)
        codec, dtype = self.codec, packed.layout.dtype
        if isinstance(codec, RowCodec) and isinstance(rows := codec.rows, RotatedRows):
            return PackedRows(codec, rows, packed)
        return widen(to_stored(self.restore(packed), dtype), dtype)

    def frombytes(self, data: bytes | bytearray | memoryview) -> Packed:
        """Return the rows of a ``Packed.tobytes`` call, which this method has to have packed.

        Raises:
            Corrupt: as ``Packed.frombytes``.
            Mismatch: as ``Packed.frombytes``, or another method packed the rows.
        """
        packed = Packed.frombytes(data)
        self._require_own(packed)
        return self._with_arrays(packed)

    def _packed(self, run: KVRun, layout: KVLayout, first_token: int) -> Packed:
        self._padded.check(layout)
        payload = memoryview(self._padded.encode(run, layout, first_token)).cast("B")
        num_tokens = tokens_in(run)
        return self._with_arrays(Packed(self.id, layout, first_token, num_tokens, payload))

    def _require_own(self, packed: object) -> None:
        if not isinstance(packed, Packed):
            words = "a Packed is wanted (bytes: frombytes)"
            raise ValueError(f"a {type(packed).__name__} was given; {words}")
        if packed.codec_id != self.id:
            raise Mismatch(f"packed by {packed.codec_id}, not by {self.id}")

    def _with_arrays(self, packed: Packed) -> Packed:
        """Return ``packed`` with ``arrays``: the payload, and its parts if the codec has rows."""
        arrays = {"payload": np.frombuffer(packed.payload, np.uint8)}
        if isinstance(self.codec, RowCodec):
            arrays |= row_arrays(self.codec, packed)
        return dataclasses.replace(packed, arrays=arrays)


def layout_of_run(run: KVRun) -> KVLayout:
    """Return the layout of the arrays of a run. Raises ``ValueError`` if they are not KV."""
    if not run:
        raise ValueError("a run without layers")
    for array in (x for pair in run for x in pair):
        _require_array(array)
    layers = tuple(KVLayer(k.shape[0], k.shape[2], v.shape[2]) for k, v in run)
    return KVLayout(_dtype_of(run[0][0]), layers)


def _layout_of_rows(rows: np.ndarray, side: Side) -> KVLayout:
    if side not in SIDES:
        raise ValueError(f"side {side!r} is neither 'key' nor 'value'")
    _require_array(rows)
    if rows.ndim != 3 or not rows.shape[2]:
        raise ValueError(f"rows of shape {rows.shape}; (heads, tokens, dim) is wanted")
    heads, _, dim = rows.shape
    layer = KVLayer(heads, dim, 0) if side == "key" else KVLayer(heads, 0, dim)
    return KVLayout(_dtype_of(rows), (layer,))


def _require_array(rows: object) -> None:
    if not isinstance(rows, np.ndarray):
        raise ValueError(f"a {type(rows).__name__} was given; a numpy array is wanted")


def _require_numbers(rows: np.ndarray) -> None:
    """Raises ``ValueError`` for NaN and infinite values, which no lossy method can pack."""
    found = (rows & 0x7F80) != 0x7F80 if rows.dtype == np.uint16 else np.isfinite(rows)
    if not found.all():
        at = tuple(int(x) for x in np.argwhere(~found)[0])
        raise ValueError(f"rows have NaN or infinite values, the first at {at}; mend them first")


def _pair(rows: np.ndarray, side: Side) -> KVPair:
    nothing = np.empty((*rows.shape[:2], 0), rows.dtype)
    return (rows, nothing) if side == "key" else (nothing, rows)


def _shape_of(packed: Packed) -> tuple[int, int, int]:
    (layer,) = packed.layout.layers
    return layer.num_kv_heads, packed.num_tokens, layer.head_dim or layer.value_dim


def _side_of(layout: KVLayout) -> Side:
    """Return the side of a layout made by ``pack``. Raises ``Mismatch`` for one of a run."""
    sides: Sequence[tuple[int, int]] = [(x.head_dim, x.value_dim) for x in layout.layers]
    if len(sides) != 1 or all(sides[0]) or not any(sides[0]):
        raise Mismatch("these are layers of a model; use restore_run")
    return "key" if sides[0][0] else "value"


def _dtype_of(array: np.ndarray) -> DType:
    for name, dtype in NUMPY_DTYPES.items():
        if array.dtype == dtype:
            found: DType = name  # type: ignore[assignment]
            return found
    raise ValueError(f"dtype {array.dtype}; float32, float16, or uint16 for bf16 is wanted")
