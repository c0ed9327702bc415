"""Takes the window rows out of a state, and packs its matrices with a codec.

An engine hands over a state as a tree in which it has marked two kinds of arrays (``state_tree``).
Rows of sliding windows are taken out and stored as chunks, so that two states of a session share
them. Matrices of recurrent layers are packed inside the tree, if the quality gate measured that. In
the stored tree a dict with a key that no engine uses replaces each such array:

    matrix    {"\\0matrix": codec id, "dtype", "shape", "payload": uint8}
    window    {"\\0window": ``number`` of the ``WindowArray``, "dtype"}
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvstore.blobs.state_tree import (
    MatrixArray,
    StateArray,
    StateTree,
    WindowArray,
    arrays_of,
    mapped,
)
from kvstore.codecs.session_codec import AnyMatrixCodec, matrix_codec_of
from kvstore.errors import Corrupt, ForeignCodec, UnknownCodec
from kvstore.shapes import KVLayout, KVPair, KVRun

_MATRIX, _WINDOW = "\0matrix", "\0window"


def without_windows(
    tree: StateTree, windows: KVLayout | None
) -> tuple[StateTree, list[KVPair] | None]:
    """Take the window rows out of a state.

    Returns:
        The rest of the tree, and for each layer of ``windows`` K and V, views (num_kv_heads,
        num_tokens, dim). If the state has no such rows: the whole tree, and None.
    """
    run = rows_of([x.array for x in window_arrays(tree)], windows) if windows else None
    if run is None:
        return tree, None
    return mapped(tree, _without_rows), run


def with_windows(tree: StateTree, run: KVRun) -> StateTree:
    """Put window rows back into a state from which ``without_windows`` took them.

    Raises:
        Corrupt: the state names rows that ``run`` does not have.
    """
    arrays = [array for pair in run for array in pair]
    return mapped(tree, lambda x: _with_rows(x, arrays))


def pack_matrices(tree: StateTree, codec: AnyMatrixCodec) -> StateTree:
    """Return a state with its marked matrices packed; all else stays as it is."""
    numbers = itertools.count()
    return mapped(tree, lambda x: _packed_matrix(x, codec, numbers))


def unpack_matrices(tree: StateTree, known: Iterable[str]) -> StateTree:
    """Return a state with its packed matrices restored.

    Args:
        known: ids of the codecs that may be read.

    Raises:
        Corrupt: ``pack_matrices`` did not make this tree.
        ForeignCodec: a matrix is packed with another codec.
    """
    ids = frozenset(known)
    return mapped(tree, lambda x: _unpacked_matrix(x, ids))


def check_matrices(tree: StateTree, known: Iterable[str]) -> None:
    """Raise ``ForeignCodec`` if a matrix is packed with a codec whose id is not in ``known``."""
    ids = frozenset(known)

    def checked(node: StateTree) -> StateTree:
        if isinstance(node, dict) and isinstance(codec_id := node.get(_MATRIX), str):
            _codec(codec_id, ids)
        return node

    mapped(tree, checked)


def window_arrays(tree: StateTree) -> list[WindowArray]:
    """Return the window arrays of a state, in order: K and V of a layer, then of the next."""
    return [x for x in arrays_of(tree) if isinstance(x, WindowArray)]


def rows_of(found: Sequence[np.ndarray], layout: KVLayout) -> list[KVPair] | None:
    """Return (1, num_kv_heads, num_tokens, dim) arrays as a run; None if the layout differs."""
    shapes = [(1, x.num_kv_heads, dim) for x in layout.layers for dim in (x.head_dim, x.value_dim)]
    if not found or [(*x.shape[:2], x.shape[-1]) for x in found] != shapes:
        return None
    if len({x.shape[2] for x in found}) > 1 or not found[0].shape[2]:
        return None
    if {x.dtype for x in found} != {layout.numpy_dtype}:
        return None
    return [(k[0], v[0]) for k, v in zip(found[::2], found[1::2], strict=True)]


def _packed_matrix(node: StateTree, codec: AnyMatrixCodec, numbers: Iterator[int]) -> StateTree:
    if not isinstance(node, MatrixArray):
        return node
    number = next(numbers)
    if not codec.takes(node.array, node.dtype):
        return node
    payload = np.frombuffer(codec.encode(node.array, node.dtype, number), np.uint8)
    return {
        _MATRIX: codec.id,
        "dtype": node.dtype,
        "shape": list(node.array.shape),
        "payload": StateArray("uint8", payload),
    }


def _unpacked_matrix(node: StateTree, known: frozenset[str]) -> StateTree:
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
            view = np.ascontiguousarray(payload).reshape(-1).data
            return StateArray(dtype, _codec(codec_id, known).decode(view, dtype, sizes))
    raise Corrupt("a packed state holds something that is no matrix")


def _codec(codec_id: str, known: frozenset[str]) -> AnyMatrixCodec:
    if codec_id not in known:
        raise ForeignCodec(f"a state is packed with codec {codec_id!r}, unknown here", codec_id)
    try:
        return matrix_codec_of(codec_id)
    except UnknownCodec as error:
        raise ForeignCodec(str(error)) from error


def _without_rows(node: StateTree) -> StateTree:
    return {_WINDOW: node.number, "dtype": node.dtype} if isinstance(node, WindowArray) else node


def _with_rows(node: StateTree, arrays: Sequence[np.ndarray]) -> StateTree:
    if not isinstance(node, dict) or _WINDOW not in node:
        return node
    match node:
        case {"\0window": int(number), "dtype": str(dtype)} if 0 <= number < len(arrays):
            return StateArray(dtype, arrays[number][None])
    raise Corrupt("a packed state names rows that it does not have")
