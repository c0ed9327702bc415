"""Packs the parts of a state that an engine has marked: matrices, and rows of sliding windows.

A packed state is again a state tree, in which a marked array is a dict with a key that no engine
uses, so the snapshot's own format stores it and bounds its reading:

    matrix    {"\\0matrix": codec id, "dtype", "shape", "payload": uint8}
    windows   {"\\0windows": [position, tokens], "segments": [...], "tree": the state}, in which
              {"\\0window": number of the array, "dtype"} stands for K or V of a layer

The rows of windows are in *segments*, runs of tokens of all layers, each packed by itself. Rows
that came from a lossy copy are never packed again: their segments are taken over from the snapshot
that they came from, bit for bit. If it is gone, they are kept as rows of 16 bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from kvstore.blobs.segments import (
    FRESH,
    Lineage,
    Segment,
    WholeRows,
    check_length,
    cover,
    fill,
)
from kvstore.blobs.snapshot import (
    MatrixArray,
    StateArray,
    StateTree,
    WindowArray,
    arrays_of,
    mapped,
)
from kvstore.codecs.base import Codec
from kvstore.codecs.session_codec import AnyMatrixCodec, SessionCodec, matrix_codec_of
from kvstore.errors import Corrupt, ForeignCodec, UnknownCodec
from kvstore.shapes import KVLayout, KVPair, KVRun, slice_tokens

SEGMENT_TOKENS: Final = 128  # of fresh rows, at multiples of it
KEPT: Final = ""  # the codec of a segment whose rows are kept as they are, in 16 bits
MAX_SEGMENTS: Final = 1 << 12
_MATRIX, _WINDOWS, _WINDOW = "\0matrix", "\0windows", "\0window"


class StatePacker:
    """Packs and unpacks states of one model. Thread-safe.

    Args:
        windows: the layers with windows, in the order in which states have them; None = none.
        known: codecs of windows' rows that may be read, by id.
        matrices: ids of codecs of matrices that may be read.
    """

    def __init__(
        self, windows: KVLayout | None, known: Mapping[str, Codec], matrices: Iterable[str]
    ) -> None:
        self._windows = windows
        self._known = known
        self._matrices = frozenset(matrices)

    # ---- packing

    def pack(
        self, codec: SessionCodec, state: StateTree, position: int, lineage: Lineage = FRESH
    ) -> StateTree:
        """Pack the marked parts of the state after ``position`` tokens; the rest stays exact."""
        # A state at exactly the position of a lossy copy is that copy: do not pack it again.
        matrices = codec.matrices if position > lineage.position else None
        numbers = itertools.count()
        packed = mapped(state, lambda x: _packed_matrix(x, matrices, numbers))
        run = _rows(state, self._windows) if codec.windows is not None else None
        if run is None or codec.windows is None:
            return packed
        segments: list[StateTree] = [
            [x.first, x.num_tokens, x.codec_id, _bytes_array(x.payload)]
            for x in self._segments(run, position, codec.windows, lineage)
        ]
        facts: list[StateTree] = [position, int(run[0][0].shape[1])]
        return {_WINDOWS: facts, "segments": segments, "tree": mapped(packed, _without_rows)}

    def _segments(
        self, run: KVRun, position: int, codec: Codec, lineage: Lineage
    ) -> Iterable[Segment]:
        assert self._windows is not None
        start = position - run[0][0].shape[1]
        lossy_end = min(max(lineage.position, start), position)
        at = start
        for segment in cover(lineage.segments, start, lossy_end):
            if segment.end > lossy_end:
                break  # later tokens may be other ones, or computed anew
            yield segment
            at = segment.end
        if at < lossy_end:
            rows = slice_tokens(run, at - start, lossy_end - start)
            kept = WholeRows(self._windows, exact=False).encode(rows)
            yield Segment(at, lossy_end - at, KEPT, memoryview(kept))
            at = lossy_end
        while at < position:
            end = min(at - at % SEGMENT_TOKENS + SEGMENT_TOKENS, position)
            rows = slice_tokens(run, at - start, end - start)
            payload = memoryview(codec.encode(rows, self._windows, at))
            yield Segment(at, end - at, codec.id, payload)
            at = end

    # ---- unpacking

    def unpack(self, tree: StateTree) -> StateTree:
        """Restore the state from its packed form.

        Raises:
            Corrupt: ``pack`` did not write it.
            ForeignCodec: it is in a codec that may not be read here.
        """
        if not isinstance(tree, dict) or _WINDOWS not in tree:
            return mapped(tree, self._unpacked_matrix)
        arrays = self._unpacked_rows(tree)
        inner = mapped(tree.get("tree"), self._unpacked_matrix)
        return mapped(inner, lambda x: _with_rows(x, arrays))

    def segments_of(self, tree: StateTree) -> list[Segment]:
        """List the segments of a packed state; none if it has none. Raises ``Corrupt``."""
        if not isinstance(tree, dict) or _WINDOWS not in tree:
            return []
        raw = tree.get("segments")
        if not isinstance(raw, list) or len(raw) > MAX_SEGMENTS:
            raise Corrupt("a packed state has no sane list of segments")
        return [_segment(x) for x in raw]

    def _unpacked_rows(self, tree: dict[str, Any]) -> list[np.ndarray]:
        """K and V of every layer, each (num_kv_heads, num_tokens, dim)."""
        if self._windows is None:
            raise Corrupt("a state with windows, of a model that has none")
        match tree[_WINDOWS]:
            case [int(position), int(num_tokens)] if 0 < num_tokens <= position:
                start = position - num_tokens
            case _:
                raise Corrupt("a packed state does not say which tokens it has")
        segments = self.segments_of(tree)
        self._check(segments, start, position)
        out = self._windows.empty(num_tokens)
        fill(segments, self._windows, start, out, self._decode, self._least)
        return [array for pair in out for array in pair]

    def _check(self, segments: Sequence[Segment], start: int, position: int) -> None:
        """Check that segments leave no hole and are not too small for their tokens."""
        at = start
        for number, segment in enumerate(segments):
            begins = segment.first <= start if number == 0 else segment.first == at
            if not begins or segment.end <= at or segment.first < 0:
                raise Corrupt("the segments of a packed state leave a hole")
            check_length(segment, self._least)
            at = segment.end
        if at < position:
            raise Corrupt("the segments of a packed state are too short")

    def _least(self, segment: Segment) -> int:
        assert self._windows is not None
        if segment.codec_id == KEPT:
            return WholeRows(self._windows, exact=False).least_nbytes(segment.num_tokens)
        codec = self._codec(segment)
        return codec.least_nbytes(self._windows, segment.num_tokens, segment.first)

    def _codec(self, segment: Segment) -> Codec:
        codec = self._known.get(segment.codec_id)
        if codec is None:
            raise ForeignCodec(f"a window is in codec {segment.codec_id!r}, not known here")
        return codec

    def _decode(self, segment: Segment, out: KVRun) -> None:
        assert self._windows is not None
        if segment.codec_id == KEPT:
            rows = WholeRows(self._windows, exact=False)
            rows.decode(segment.payload, segment.num_tokens, out)
            return
        self._codec(segment).decode(segment.payload, self._windows, segment.first, out)

    def _unpacked_matrix(self, node: StateTree) -> StateTree:
        if not isinstance(node, dict) or _MATRIX not in node:
            return node
        match node:
            case {
                "\0matrix": str(codec_id),
                "dtype": str(dtype),
                "shape": list(shape),
                "payload": StateArray("uint8", payload),
            }:
                sizes = [x for x in shape if type(x) is int]
                if len(sizes) != len(shape):
                    raise Corrupt("a packed state has no sane shape")
                codec = self._matrix_codec(codec_id)
                array = codec.decode(_view(payload), dtype, sizes)
                return StateArray(dtype, array)
        raise Corrupt("a packed state holds something that is no matrix")

    def _matrix_codec(self, codec_id: str) -> AnyMatrixCodec:
        if codec_id not in self._matrices:
            raise ForeignCodec(f"a state is in codec {codec_id!r}, which is not known here")
        try:
            return matrix_codec_of(codec_id)
        except UnknownCodec as error:
            raise ForeignCodec(str(error)) from error


# ---- trees


def window_arrays(tree: StateTree) -> list[WindowArray]:
    """List the rows of windows in a state, in order: K and V of a layer, then of the next."""
    return [x for x in arrays_of(tree) if isinstance(x, WindowArray)]


def _rows(tree: StateTree, layout: KVLayout | None) -> list[KVPair] | None:
    """Return the rows of the layers with windows as a run; None if they do not fit the layout."""
    found = [x.array for x in window_arrays(tree)]
    return rows_of(found, layout) if layout is not None else None


def rows_of(found: Sequence[np.ndarray], layout: KVLayout) -> list[KVPair] | None:
    """Make a run of (1, num_kv_heads, num_tokens, dim) arrays; None if the layout differs."""
    shapes = [(1, x.num_kv_heads, dim) for x in layout.layers for dim in (x.head_dim, x.value_dim)]
    if not found or [(*x.shape[:2], x.shape[-1]) for x in found] != shapes:
        return None
    if len({x.shape[2] for x in found}) > 1 or not found[0].shape[2]:
        return None
    if {x.dtype for x in found} != {layout.numpy_dtype}:
        return None
    return [(k[0], v[0]) for k, v in zip(found[::2], found[1::2], strict=True)]


def _packed_matrix(
    node: StateTree, codec: AnyMatrixCodec | None, numbers: Iterator[int]
) -> StateTree:
    if not isinstance(node, MatrixArray) or codec is None:
        return node
    number = next(numbers)
    if not codec.takes(node.array, node.dtype):
        return node
    return {
        _MATRIX: codec.id,
        "dtype": node.dtype,
        "shape": list(node.array.shape),
        "payload": _bytes_array(codec.encode(node.array, node.dtype, number)),
    }


def _without_rows(node: StateTree) -> StateTree:
    return {_WINDOW: node.number, "dtype": node.dtype} if isinstance(node, WindowArray) else node


def _with_rows(node: StateTree, arrays: Sequence[np.ndarray]) -> StateTree:
    if not isinstance(node, dict) or _WINDOW not in node:
        return node
    match node:
        case {"\0window": int(number), "dtype": str(dtype)} if 0 <= number < len(arrays):
            return StateArray(dtype, arrays[number][None])
    raise Corrupt("a packed state names rows that it does not have")


def _segment(raw: object) -> Segment:
    match raw:
        case [int(first), int(count), str(codec_id), StateArray("uint8", payload)] if count > 0:
            return Segment(first, count, codec_id, _view(payload))
    raise Corrupt("a packed state holds something that is no segment")


def _bytes_array(payload: bytes | memoryview) -> StateArray:
    return StateArray("uint8", np.frombuffer(payload, np.uint8))


def _view(payload: np.ndarray) -> memoryview:
    return np.ascontiguousarray(payload).reshape(-1).data
