"""The state of layers that do not keep every token: recurrent layers and sliding windows.

Such a state cannot be cut back to an earlier token, so it is stored as it was after one position.
An engine hands it over as a *tree*: nested lists, tuples and dicts of plain values and arrays, in
the shape that its own cache classes take back. The form written here is exact. ``state_packer`` may
pack the arrays that an engine has marked, at once or later, since the marks are stored too.

In a blob the tree is msgpack in which every container and array carries a number for its type, and
arrays refer to one raw section that follows it:

    u32 length of the structure | u32 0 | structure | zeros up to 64 bytes | arrays, 64-byte aligned
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from kvstore.errors import Corrupt
from kvstore.shapes import NUMPY_DTYPES


@dataclass(frozen=True)
class StateArray:
    """An array of a state, bit for bit. ``dtype`` is a numpy name, or "bfloat16" for uint16."""

    dtype: str
    array: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)


@dataclass(frozen=True)
class MatrixArray(StateArray):
    """Matrices of a recurrent layer, which a codec may pack; a row lies along the last axis."""


@dataclass(frozen=True)
class WindowArray(StateArray):
    """K or V of a layer with a sliding window, (1, num_kv_heads, num_tokens, dim).

    A codec may pack it. It has the rows of the newest tokens, in order. ``number``: 0 is K of the
    first such layer, 1 is its V, 2 is K of the next.
    """

    number: int


StateTree: TypeAlias = (
    None
    | bool
    | int
    | float
    | str
    | StateArray
    | list["StateTree"]
    | tuple["StateTree", ...]
    | dict[str, "StateTree"]
)


MAX_DEPTH: Final = 32
MAX_NODES: Final = 1 << 16
MAX_NDIM: Final = 8
MAX_STRUCTURE_BYTES: Final = 1 << 20  # as objects it takes up to 64 times as much
_ALIGNMENT: Final = 64
_LIST, _TUPLE, _DICT, _ARRAY, _MATRIX, _WINDOW = range(6)
_PLAIN = "bool float32 float64 complex64 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
_DTYPES: Final = {**{name: np.dtype(name) for name in _PLAIN.split()}, **NUMPY_DTYPES}


def arrays_of(tree: StateTree) -> Iterator[StateArray]:
    """Yield all arrays of the tree, in order."""
    if isinstance(tree, StateArray):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for node in tree.values() if isinstance(tree, dict) else tree:
            yield from arrays_of(node)


def mapped(tree: StateTree, of: Callable[[StateTree], StateTree]) -> StateTree:
    """Return a copy of a tree in which ``of`` replaced nodes.

    ``of`` returns a node unchanged to keep it; a replaced node is not searched further.
    """
    changed = of(tree)
    if changed is not tree:
        return changed
    if isinstance(tree, dict):
        return {key: mapped(x, of) for key, x in tree.items()}
    if isinstance(tree, list):
        return [mapped(x, of) for x in tree]
    return tuple(mapped(x, of) for x in tree) if isinstance(tree, tuple) else tree


def state_nbytes(tree: StateTree) -> int:
    """Return the total bytes of all arrays of the tree."""
    return sum(x.nbytes for x in arrays_of(tree))


def state_elements(tree: StateTree) -> int:
    """Count the values in all arrays of the tree."""
    return sum(int(x.array.size) for x in arrays_of(tree))


def copied_state(tree: StateTree) -> StateTree:
    """Return a tree with copies of its arrays, which may be views; marks are kept."""

    def copied(node: StateTree) -> StateTree:
        return replace(node, array=node.array.copy()) if isinstance(node, StateArray) else node

    return mapped(tree, copied)


def encode_state(tree: StateTree) -> bytes:
    """Return the tree as bytes.

    Raises:
        TypeError: a value or a dtype has no exact form here.
        ValueError: the tree is too deep or too large.
    """
    writer = _Writer()
    structure = msgspec.msgpack.encode(writer.node(tree, 0))
    if len(structure) > MAX_STRUCTURE_BYTES:
        raise ValueError("a state tree is too large to be stored")
    head = struct.pack("<II", len(structure), 0) + structure
    return b"".join((head, bytes(-len(head) % _ALIGNMENT), *writer.arrays))


def decode_state(payload: memoryview) -> StateTree:
    """Return the tree in a payload; its arrays are copies, together no larger than the payload.

    Raises:
        Corrupt: ``encode_state`` did not write the payload.
    """
    if len(payload) < 8:
        raise Corrupt("a state is too short")
    length, zero = struct.unpack_from("<II", payload)
    first = 8 + length
    if zero or length > MAX_STRUCTURE_BYTES or first > len(payload):
        raise Corrupt("a state's structure is longer than the state or the limit")
    try:
        structure = msgspec.msgpack.decode(payload[8:first])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"a state's structure cannot be read: {error}") from error
    return _Reader(payload[first + -first % _ALIGNMENT :]).node(structure, 0)


class _Writer:
    def __init__(self) -> None:
        self.arrays: list[bytes] = []
        self._nbytes = 0
        self._num_nodes = 0

    def node(self, tree: StateTree, depth: int) -> object:
        self._num_nodes += 1
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise ValueError("a state tree is too deep or too large to be stored")
        if tree is None or isinstance(tree, bool | float | str):
            return tree
        if isinstance(tree, int):
            return int(tree)
        if isinstance(tree, StateArray):
            return self._array(tree)
        if isinstance(tree, dict):
            return [_DICT, [[_key(k), self.node(v, depth + 1)] for k, v in tree.items()]]
        if isinstance(tree, list | tuple):
            kind = _LIST if isinstance(tree, list) else _TUPLE
            return [kind, [self.node(x, depth + 1) for x in tree]]
        raise TypeError(f"{type(tree).__name__} cannot be part of a stored state")

    def _array(self, leaf: StateArray) -> object:
        dtype = _DTYPES.get(leaf.dtype)
        if dtype is None or leaf.array.dtype != dtype or leaf.array.ndim > MAX_NDIM:
            found = f"{leaf.array.ndim}-d array of {leaf.array.dtype}"
            raise TypeError(f"a {found} cannot be stored as {leaf.dtype}")
        raw = leaf.array.tobytes()
        offset, padding = self._nbytes, -len(raw) % _ALIGNMENT
        self.arrays += [raw, bytes(padding)]
        self._nbytes += len(raw) + padding
        place = [leaf.dtype, list(leaf.array.shape), offset]
        if isinstance(leaf, WindowArray):
            return [_WINDOW, *place, leaf.number]
        return [_MATRIX if isinstance(leaf, MatrixArray) else _ARRAY, *place]


class _Reader:
    def __init__(self, arrays: memoryview) -> None:
        self._arrays = arrays
        self._num_nodes = 0
        self._nbytes = 0

    def node(self, raw: Any, depth: int) -> StateTree:
        self._num_nodes += 1
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise Corrupt("a state is too deep or too large")
        if raw is None or isinstance(raw, bool | int | float | str):
            return raw
        match raw:
            case [0, list(items)]:
                return [self.node(x, depth + 1) for x in items]
            case [1, list(items)]:
                return tuple(self.node(x, depth + 1) for x in items)
            case [2, list(items)]:
                return dict(self._items(items, depth))
            case [3, str(dtype), list(shape), int(offset)]:
                return self._array(dtype, shape, offset)
            case [4, str(dtype), list(shape), int(offset)]:
                return MatrixArray(dtype, self._array(dtype, shape, offset).array)
            case [5, str(dtype), list(shape), int(offset), int(number)]:
                return WindowArray(dtype, self._array(dtype, shape, offset).array, number)
        raise Corrupt("a state has a node of unknown type")

    def _items(self, items: list[Any], depth: int) -> Iterable[tuple[str, StateTree]]:
        for item in items:
            match item:
                case [str(key), value]:
                    yield key, self.node(value, depth + 1)
                case _:
                    raise Corrupt("a state's dict has a malformed entry")

    def _array(self, name: str, shape: list[Any], offset: int) -> StateArray:
        dtype = _DTYPES.get(name)
        sane = len(shape) <= MAX_NDIM and all(type(x) is int and x >= 0 for x in shape)
        if dtype is None or not sane or offset < 0:
            raise Corrupt("a state's array has no sane dtype, shape or place")
        nbytes = math.prod(shape) * dtype.itemsize
        self._nbytes += nbytes
        # Arrays may not share bytes; otherwise a small payload could request a lot of memory.
        if max(offset + nbytes, self._nbytes) > len(self._arrays):
            raise Corrupt("a state's array lies outside the state")
        array = np.frombuffer(bytearray(self._arrays[offset : offset + nbytes]), dtype)
        try:
            return StateArray(name, array.reshape(shape))
        except (ValueError, OverflowError) as error:  # no elements, but an absurd width
            raise Corrupt("a state's array has no sane shape") from error


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a state's dict key must be a string, not {type(key).__name__}")
    return key
