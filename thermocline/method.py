"""A method that packs rows of KV, to be used on plain numpy arrays."""

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
CHUNK_TOKENS = 128  # of the chunks that ``bits`` counts, as a server packs them
PAST_SINKS = 1 << 20  # a token that is not among a session's first ones
USUAL_LAYOUT = KVLayout("bfloat16", (KVLayer(1, 128, 128),))


class Method:
    """One codec of ``thermocline.codecs()``, or of one's own. Stateless and thread-safe.

    Arrays are fp32, fp16, or uint16, which stands for the bit patterns of bf16. Rows of any length
    can be packed; those that the method itself cannot take are filled up with zeros.
    """

    def __init__(self, codec: Codec) -> None:
        """Raises ``UnknownCodec``: it is no object that has all of a codec's members."""
        self.codec = as_codec(codec, "the codec of a Method")  # what a server would use
        self._padded = PaddedCodec(codec)

    def __repr__(self) -> str:
        return f"<Method {self.id}>"

    @property
    def id(self) -> str:
        """The method's name and version of arithmetic: the same id means the same bytes."""
        return self.codec.id

    @property
    def exact(self) -> bool:
        """True if nothing is lost."""
        return self.codec.exact

    def nbytes(self, num_tokens: int, layout: KVLayout, first_token: int = 0) -> int:
        """Returns the bytes of so many tokens, an estimate where codes are entropy-coded."""
        return self._padded.packed_nbytes(layout, num_tokens, first_token)

    def bits(self, layout: KVLayout = USUAL_LAYOUT) -> float:
        """Returns bits for each value, all scales and tables of a chunk of 128 tokens included.

        The first four tokens of a session, which are kept as they are, are not counted.
        """
        packed = self.nbytes(CHUNK_TOKENS, layout, PAST_SINKS)
        return 8 * packed / (CHUNK_TOKENS * layout.elements_per_token)

    def pack(self, rows: np.ndarray, side: Side = "key", first_token: int = 0) -> Packed:
        """Packs the keys or the values of some heads.

        ``rows``: (heads, tokens, dim). ``first_token`` is the position of the first of them in its
        session: tokens 0 to 3 are kept in 16 bits, as attention leans on them most.

        Raises:
            ValueError: it is no array, or of another shape or dtype, or has values that are no
                numbers; or the side is neither.
            UnknownCodec: the method learned all layers of a model; use ``pack_run``.
        """
        layout = _layout_of_rows(rows, side)
        if not self.exact:
            _require_numbers(rows)
        run = [_pair(np.ascontiguousarray(rows), side)]
        return self._packed(run, layout, first_token)

    def pack_run(self, run: KVRun, first_token: int = 0) -> Packed:
        """Packs all layers of a model: K and V, (heads, tokens, dim) each, for every layer.

        Raises as ``pack``.
        """
        layout = layout_of_run(run)
        if not self.exact:
            for array in (x for pair in run for x in pair):
                _require_numbers(array)
        return self._packed(run, layout, first_token)

    def restore(self, packed: Packed, out: np.ndarray | None = None) -> np.ndarray:
        """Returns the rows that ``pack`` was given, as nearly as the method kept them.

        ``out``: where to put them, (heads, tokens, dim) in the dtype that was packed.

        Raises:
            Mismatch: they were packed by another method, or are layers of a model.
            Corrupt: the payload is not one of this method's.
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
        """Returns K and V of all layers that ``pack_run`` was given. Raises as ``restore``."""
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
        """Returns the products of queries with packed rows, fp32 (heads, queries, tokens).

        Rows of ``tq1`` to ``tq8`` stay packed: the query is rotated instead of them. Rows of other
        methods are restored first. ``query``: fp32 (heads, queries, dim).

        Raises:
            ValueError: the query is of other heads or of another dimension.
            Mismatch, Corrupt: as ``restore``.
        """
        rows, (heads, _, dim) = self._rows_of(packed), _shape_of(packed)
        if query.ndim != 3 or query.shape[::2] != (heads, dim) or query.dtype != np.float32:
            raise ValueError(f"a query of {query.shape}; fp32 ({heads}, queries, {dim}) is wanted")
        if isinstance(rows, PackedRows):
            return rows.products(query)
        return np.asarray(query @ rows.swapaxes(1, 2))

    def weighted_sum(self, weights: np.ndarray, packed: Packed) -> np.ndarray:
        """Returns weighted sums of packed rows, fp32 (heads, queries, dim).

        ``weights``: fp32 (heads, queries, tokens). Raises as ``scores``.
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
        """Reads what ``Packed.tobytes`` returned, and looks whether it is this method's.

        Raises:
            Corrupt, Mismatch: as ``Packed.frombytes``; also for another method's.
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
        """Returns ``packed`` with the parts of its payload, where the method packs rows alone."""
        arrays = {"payload": np.frombuffer(packed.payload, np.uint8)}
        if isinstance(self.codec, RowCodec):
            arrays |= row_arrays(self.codec, packed)
        return dataclasses.replace(packed, arrays=arrays)


def layout_of_run(run: KVRun) -> KVLayout:
    """Returns the layout of the arrays of a run. Raises ``ValueError`` if they have none."""
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
    """Refuses NaN and infinite values, of which no lossy method makes anything."""
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
    """Returns the side that a layout of one layer has. Raises ``Mismatch`` for any other."""
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
