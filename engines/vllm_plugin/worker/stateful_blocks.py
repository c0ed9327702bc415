"""Saves and loads the state of layers that do not keep all tokens.

A state is stored raw, whatever the codec: a recurrent state cannot be cut back or repaired, and an
error in it would affect every token that follows. A window's rows are read in the order of tokens,
heads and elements, like those of other layers, so that the state can be loaded by an engine whose
backend lays out its blocks differently.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engines.vllm_plugin.groups import IN_USE, NULL_BLOCK, StateGroup
from engines.vllm_plugin.worker.host_blocks import DeviceStream
from engines.vllm_plugin.worker.paging import PagedCache
from engines.vllm_plugin.worker.transfer import Blocks, Filling, Packing, Rows
from kvstore.blobs.packer import AnyBlob
from kvstore.blobs.snapshot import StateArray, StateTree
from kvstore.by_blocks.names import BlobSpan
from kvstore.by_blocks.store import BlockStore
from kvstore.errors import Corrupt, Unusable

logger = logging.getLogger("thermocline.vllm")

_BITS: Mapping[int, tuple[torch.dtype, str]] = {
    1: (torch.uint8, "uint8"),
    2: (torch.int16, "int16"),
    4: (torch.int32, "int32"),
    8: (torch.int64, "int64"),
}
Arrays: TypeAlias = list[np.ndarray]


class StateLayers(Protocol):
    """Reads and writes the blocks of one group's layers."""

    def read(self, block_ids: Sequence[int]) -> Arrays:
        """Copies of what these blocks hold, one array or more per layer."""

    def write(self, block_ids: Sequence[int], arrays: Arrays) -> None:
        """Copy arrays, shaped as by ``read``, into these blocks; those ``IN_USE`` stay as they are.

        Raises ``Corrupt``, before anything is written: shapes or dtypes differ from the engine's.
        """


class RecurrentLayers:
    """Recurrent layers: tensors (num_blocks, ...) of any shape and dtype, copied bit by bit.

    vLLM gives one tensor of bytes per layer, in which a block is the layer's states in a row.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def read(self, block_ids: Sequence[int]) -> Arrays:
        return [_bits(x.index_select(0, _index(block_ids, x))).cpu().numpy() for x in self._tensors]

    def write(self, block_ids: Sequence[int], arrays: Arrays) -> None:
        wanted = [(len(block_ids), *x.shape[1:]) for x in self._tensors]
        names = [_BITS[x.element_size()][1] for x in self._tensors]
        _check(arrays, wanted, names)
        taken = [i for i, x in enumerate(block_ids) if x != IN_USE]
        index = [block_ids[i] for i in taken]
        for tensor, array in zip(self._tensors, arrays, strict=True):
            rows = torch.from_numpy(array)[taken].view(tensor.dtype)
            tensor.index_copy_(0, _index(index, tensor), rows.to(tensor.device))


class WindowLayers:
    """Layers with a sliding window: K and V, in the order of the tokens."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def read(self, block_ids: Sequence[int]) -> Arrays:
        return [x for pair in self._cache.read(block_ids) for x in pair]

    def write(self, block_ids: Sequence[int], arrays: Arrays) -> None:
        cache = self._cache
        like = [x for pair in cache.layout.empty(len(block_ids) * cache.block_tokens) for x in pair]
        _check(arrays, [x.shape for x in like], [x.dtype.name for x in like])
        run = list(zip(arrays[::2], arrays[1::2], strict=True))
        for i, block in enumerate(block_ids):
            if block != IN_USE:
                cache.write([block], run, i)


class StatefulBlocks:
    """Implements ``transfer.Blocks``: handles states itself, and leaves the rest to ``blocks``.

    The block ids of a state are those of all groups in a row, as many for each as its ``reach``.
    """

    def __init__(
        self,
        blocks: Blocks,
        groups: Sequence[StateGroup],
        layers: Sequence[StateLayers],
        store: BlockStore,
        stream: DeviceStream,
    ) -> None:
        self._blocks = blocks
        self._groups = groups
        self._layers = layers
        self._store = store
        self._stream = stream

    @property
    def block_bytes(self) -> int:
        return self._blocks.block_bytes  # vLLM makes blocks of all groups the same size

    def mark(self) -> object:
        return self._blocks.mark()

    def pack(
        self, wanted: Sequence[Packing], ready: object, rows: Rows | None = None
    ) -> list[Future[bytes]]:
        states = [x for x in wanted if x.span.is_state]
        rest = [x for x in wanted if not x.span.is_state]
        packed = self._blocks.pack(rest, ready, rows)
        futures = dict(zip((x.span for x in rest), packed, strict=True))
        for x in states:
            with self._stream.after(ready):
                tree = self._read(x)
            futures[x.span] = self._store.workers.codec(self._packed, x.span, tree)
        return [futures[x.span] for x in wanted]

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        filled = self._blocks.fill([x for x in wanted if not x.span.is_state], ready)
        for x in wanted:
            if x.span.is_state and NULL_BLOCK not in x.block_ids and self._restored(x, ready):
                filled.update(x.block_ids)
        return filled

    def close(self) -> None:
        self._blocks.close()

    def _shares(self, span: BlobSpan, block_ids: Sequence[int]) -> list[list[int]]:
        """The state's block ids, by group."""
        ids = iter(block_ids)
        return [list(islice(ids, len(x.reach(span.end_block)))) for x in self._groups]

    def _read(self, packing: Packing) -> StateTree:
        shares = self._shares(packing.span, packing.block_ids)
        return [
            [StateArray(x.dtype.name, x) for x in layers.read(ids)]
            for layers, ids in zip(self._layers, shares, strict=True)
        ]

    def _packed(self, span: BlobSpan, tree: StateTree) -> bytes:
        packer = self._store.packer
        return packer.pack_snapshot(span.key, tree, packer.layout.empty(0), self._token(span), 0)

    def _token(self, span: BlobSpan) -> int:
        """The number of tokens before the state."""
        return span.end_block * self._store.keys.block_tokens

    def _restored(self, filling: Filling, ready: object) -> bool:
        span = filling.span
        try:
            tree = self._unpacked(span, filling.blob)
            with self._stream.after(ready):
                self._write(self._shares(span, filling.block_ids), tree)
        except Unusable as error:
            logger.warning("a verified state cannot be used: %s", error)
            self._store.discard(span.key)
            return False
        return True

    def _unpacked(self, span: BlobSpan, blob: AnyBlob) -> StateTree:
        packer = self._store.packer
        out = packer.layout.empty(0)
        return packer.unpack_snapshot(blob, span.key, self._token(span), 0, out)

    def _write(self, shares: Sequence[Sequence[int]], tree: StateTree) -> None:
        if not isinstance(tree, list) or len(tree) != len(shares):
            raise Corrupt("a state of another model's layers")
        for layers, ids, leaves in zip(self._layers, shares, tree, strict=True):
            layers.write(ids, _arrays(leaves))


def _arrays(leaves: StateTree) -> Arrays:
    leaves = leaves if isinstance(leaves, list) else []
    return [x.array for x in leaves if isinstance(x, StateArray)]


def _check(arrays: Arrays, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> None:
    found = [(tuple(x.shape), x.dtype.name) for x in arrays]
    if found != [(tuple(shape), name) for shape, name in zip(shapes, dtypes, strict=True)]:
        raise Corrupt("a state whose arrays have another shape or dtype than the engine's")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()][0])


def _index(block_ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(block_ids, dtype=torch.long, device=like.device)
