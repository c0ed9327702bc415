"""Reads and writes the state of layers that do not keep all tokens, in vLLM's blocks.

A window's rows are read in the order of tokens, heads and elements, like those of other layers, so
that an engine whose backend lays out its blocks differently can load the state. Arrays that a codec
may pack are marked: windows' rows, and matrices of recurrent layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engines.vllm_plugin.blocks.paging import DTYPES, PagedCache
from engines.vllm_plugin.groups import IN_USE, StateGroup
from engines.wire import KVSize
from kvstore.blobs.state_tree import MatrixArray, StateArray, StateTree, WindowArray
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayout, StateLayout

LEAST_MATRIX_ROWS: Final = 8  # convolutions are narrower
OTHER_STATE: Final = "a state whose arrays have another shape or dtype than the engine's"
Arrays: TypeAlias = list[StateArray]


@dataclass(frozen=True)
class StatePart:
    """One of the consecutive arrays in a recurrent layer's block."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def is_matrix(self) -> bool:
        """True for matrices of a state; False for the few newest inputs of a convolution."""
        rows = math.prod(self.shape[:-1])
        return len(self.shape) > 2 and rows >= LEAST_MATRIX_ROWS and self.dtype in DTYPES

    def named(self, block: np.ndarray) -> StateArray:
        """Convert bytes, (num_blocks, nbytes), to an array with this part's dtype and kind."""
        if self.dtype not in DTYPES:
            return StateArray("uint8", block)
        # bf16 is represented by its bits, as everywhere in the store.
        kind = np.uint16 if self.dtype == torch.bfloat16 else np.dtype(DTYPES[self.dtype])
        array = np.ascontiguousarray(block).view(kind).reshape(len(block), *self.shape)
        return (MatrixArray if self.is_matrix else StateArray)(DTYPES[self.dtype], array)


class RecurrentLayers:
    """Recurrent layers: tensors (num_blocks, ...) of any shape and dtype, copied bit by bit.

    vLLM provides one tensor of bytes per layer, (num_blocks, 1, 1, nbytes). A block holds the
    layer's states one after the other, and perhaps some unused room after them.
    """

    def __init__(self, tensors: Sequence[Tensor], parts: Sequence[StatePart] = ()) -> None:
        """``parts``: the arrays in a tensor's block; () = unknown, so blocks are copied whole."""
        self._tensors = [_flat(x) for x in tensors]
        self._parts = parts if tensors and _fit(self._tensors, parts) else ()

    @property
    def has_matrices(self) -> bool:
        """True if the layers keep matrices that a codec may pack."""
        return any(x.is_matrix for x in self._parts)

    @property
    def nbytes(self) -> int:
        """The bytes of one state of all layers."""
        return sum(part.nbytes for x in self._tensors for part in self._parts_of(x))

    def _parts_of(self, tensor: Tensor) -> Sequence[StatePart]:
        return self._parts or [StatePart(torch.uint8, (tensor[0].nbytes,))]

    def read(self, block_ids: Sequence[int]) -> Arrays:
        """Return copies of the contents of these blocks, one array or more per layer."""
        return [x for tensor in self._tensors for x in self._read(tensor, block_ids)]

    def _read(self, tensor: Tensor, block_ids: Sequence[int]) -> Iterator[StateArray]:
        blocks = tensor.index_select(0, _index(block_ids, tensor)).flatten(1).contiguous()
        content, at = blocks.view(torch.uint8).cpu().numpy(), 0
        for part in self._parts_of(tensor):
            yield part.named(content[:, at : at + part.nbytes])
            at += part.nbytes

    def write(self, block_ids: Sequence[int], arrays: Arrays) -> None:
        """Copy arrays, shaped as in ``read``, into these blocks; skip blocks that are ``IN_USE``.

        Raises ``Corrupt`` before it writes: shapes or dtypes differ from the engine's.
        """
        count, parts = len(block_ids), [self._parts_of(x) for x in self._tensors]
        empty = [x.named(np.zeros((count, x.nbytes), np.uint8)) for y in parts for x in y]
        check_arrays(arrays, empty)
        taken = [i for i, x in enumerate(block_ids) if x != IN_USE]
        index, rest = [block_ids[i] for i in taken], iter(arrays)
        for tensor, of_tensor in zip(self._tensors, parts, strict=True):
            contents = [_as_bytes(x.array, count) for x in islice(rest, len(of_tensor))]
            rows = torch.from_numpy(np.concatenate(contents, 1)[taken]).view(tensor.dtype)
            # The unused room after a block's parts is not written.
            target = tensor[:, : rows.shape[1]] if tensor.ndim == 2 else tensor
            rows = rows.view(-1, *target.shape[1:]).to(tensor.device)
            target.index_copy_(0, _index(index, tensor), rows)


class WindowLayers:
    """Layers with a sliding window: K and V, in the order of the tokens.

    ``read`` and ``write`` are those of ``RecurrentLayers``.
    """

    has_matrices = False

    def __init__(self, cache: PagedCache, first_number: int = 0) -> None:
        """``first_number``: the number of window arrays in the groups before this one."""
        self._cache = cache
        self._first_number = first_number

    @property
    def layout(self) -> KVLayout:
        return self._cache.layout

    @property
    def block_tokens(self) -> int:
        return self._cache.block_tokens

    def read(self, block_ids: Sequence[int]) -> Arrays:
        dtype, rows = self._cache.layout.dtype, [x for y in self._cache.read(block_ids) for x in y]
        return [WindowArray(dtype, x[None], i) for i, x in enumerate(rows, self._first_number)]

    def write(self, block_ids: Sequence[int], arrays: Arrays) -> None:
        cache = self._cache
        empty = cache.layout.empty(len(block_ids) * cache.block_tokens)
        wanted = [((1, *x.shape), x.dtype) for pair in empty for x in pair]
        if [(x.array.shape, x.array.dtype) for x in arrays] != wanted:
            raise Corrupt(OTHER_STATE)
        rows = [x.array[0] for x in arrays]
        run = list(zip(rows[::2], rows[1::2], strict=True))
        for i, block in enumerate(block_ids):
            if block != IN_USE:
                cache.write([block], run, i)


StateLayers: TypeAlias = RecurrentLayers | WindowLayers


class StateBlocks:
    """All groups that do not keep all tokens; a state's block ids are theirs, group after group."""

    def __init__(self, groups: Sequence[StateGroup], layers: Sequence[StateLayers]) -> None:
        self._groups = groups
        self._layers = layers

    @property
    def layout(self) -> StateLayout:
        """The parts of a state that a codec may pack: windows of equal length, and matrices."""
        windows = [
            (group.num_blocks, x.layout)
            for group, x in zip(self._groups, self._layers, strict=True)
            if isinstance(x, WindowLayers)
        ]
        equal = len({(num_blocks, x.dtype) for num_blocks, x in windows}) == 1
        kept = tuple(layer for _, x in windows for layer in x.layers)
        tokens = max((x.num_blocks for x in self._groups if not x.recurrent), default=0)
        return StateLayout(
            windows=KVLayout(windows[0][1].dtype, kept) if equal else None,
            window_tokens=tokens * self.block_tokens if equal else 0,
            has_matrices=any(x.has_matrices for x in self._layers),
        )

    def kv_size(self, itemsize: int = 0) -> KVSize:
        """Return the size of a session's state.

        ``itemsize``: assumed bytes of a value in a window; 0 = those of the window's own dtype.
        """
        windows, fixed = [], 0
        for group, x in zip(self._groups, self._layers, strict=True):
            if isinstance(x, WindowLayers):
                per_token = x.layout.elements_per_token * itemsize or x.layout.bytes_per_token
                windows.append((per_token, group.num_blocks * x.block_tokens))
            else:
                fixed += x.nbytes
        return KVSize(0, tuple(windows), fixed)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of layers with windows; 0 if there are none."""
        return next((x.block_tokens for x in self._layers if isinstance(x, WindowLayers)), 0)

    def places(self, boundary: int) -> list[tuple[int, bool]]:
        """Return the number in the session of each of a state's blocks, and if it is a window's.

        The order is that of the state's block ids.
        """
        return [(i, not x.recurrent) for x in self._groups for i in x.reach(boundary)]

    def _shares(self, boundary: int, block_ids: Sequence[int]) -> list[list[int]]:
        """Split the block ids of the state after ``boundary`` blocks by group."""
        ids = iter(block_ids)
        return [list(islice(ids, len(x.reach(boundary)))) for x in self._groups]

    def read(self, boundary: int, block_ids: Sequence[int]) -> StateTree:
        """Return a copy of the state after ``boundary`` blocks, which is in these blocks."""
        shares = self._shares(boundary, block_ids)
        return [list(x.read(ids)) for x, ids in zip(self._layers, shares, strict=True)]

    def write(self, boundary: int, block_ids: Sequence[int], tree: StateTree) -> None:
        """Copy the state after ``boundary`` blocks into these blocks. Raises ``Corrupt``."""
        shares = self._shares(boundary, block_ids)
        if not isinstance(tree, list) or len(tree) != len(shares):
            raise Corrupt("a state of another model's layers")
        for layers, ids, leaves in zip(self._layers, shares, tree, strict=True):
            arrays = leaves if isinstance(leaves, list) else []
            layers.write(ids, [x for x in arrays if isinstance(x, StateArray)])


def check_arrays(arrays: Sequence[StateArray], wanted: Sequence[StateArray]) -> None:
    """Raise ``Corrupt`` if shapes or dtypes differ from those of ``wanted``."""
    found = [(x.dtype, x.array.shape, x.array.dtype) for x in arrays]
    if found != [(x.dtype, x.array.shape, x.array.dtype) for x in wanted]:
        raise Corrupt(OTHER_STATE)


def _flat(tensor: Tensor) -> Tensor:
    """View the tensor without the axes of length one that vLLM's blocks of bytes have."""
    axes = tuple(i for i, length in enumerate(tensor.shape) if i and length == 1)
    return tensor.squeeze(axes) if tensor.ndim > 2 else tensor


def _fit(tensors: Sequence[Tensor], parts: Sequence[StatePart]) -> bool:
    """Return whether the blocks consist of bytes and have room for these parts."""
    nbytes = sum(x.nbytes for x in parts)
    return all(x.ndim == 2 and x.element_size() == 1 and x.shape[1] >= nbytes for x in tensors)


def _as_bytes(array: np.ndarray, count: int) -> np.ndarray:
    content: np.ndarray = np.ascontiguousarray(array).reshape(count, -1).view(np.uint8)
    return content


def _index(block_ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(block_ids, dtype=torch.long, device=like.device)
