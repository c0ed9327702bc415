"""The layout of a staging region between blocks and blob: a packed payload, or raw rows.

A region with a *packed* layout is written by the codec's own kernels and holds the payload. For
every other blob (codec ``raw``, tails, a codec or dtype or head dimension without kernels) rows are
only gathered and scattered on the device, and the store's packer works on the region as if it were
the engine's arrays. Either way the blob is byte for byte what ``host_blocks`` makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engines.vllm_plugin.device.kv_views import KVViewGroup
from engines.vllm_plugin.device.triton_rows import TritonRows, gather, scatter
from kvstore.blobs.packer import AnyBlob, Packer
from kvstore.by_blocks.names import BlobSpan
from kvstore.codecs.rows.payload import KEPT_DTYPE, PayloadPlan
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.shapes import KVLayout, KVPair


@dataclass(frozen=True)
class KeptRows:
    """Rows of one side that cannot be packed and are kept in the engine's dtype.

    Attributes:
        side: the number of the side among all, as in ``KVViewGroup``.
        heads: int64 (num_rows,).
        tokens: int64 (num_rows,), counted from the blob's first token.
        values: uint16 (num_rows, dim), bit patterns.
    """

    side: int
    heads: np.ndarray
    tokens: np.ndarray
    values: np.ndarray


class StagingLayout(Protocol):
    """The layout of all blobs of one length and position; thread-safe, without state.

    In every call ``staged`` is the region, uint8 (nbytes,). ``blocks`` are the ids of the blocks of
    a run of tokens, int64 (num_blocks,) on the device, and ``first`` is the blob's first token in
    that run. ``first_token`` counts from the session's beginning.
    """

    @property
    def nbytes(self) -> int:
        """The size of a region."""

    def read(self, blocks: Tensor, first: int, staged: Tensor) -> None:
        """Ask the device to fill the region from the blocks."""

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        """Return the rows that the device could not pack; called before the blocks are reused."""

    def seal(self, span: BlobSpan, first_token: int, staged: np.ndarray, rescued: bytes) -> bytes:
        """Make the blob of a region and the rescued rows. On any thread."""

    def open(
        self, blob: AnyBlob, span: BlobSpan, first_token: int, staged: np.ndarray
    ) -> list[KeptRows]:
        """Fill the region from a blob; return the rows it does not hold. On any thread.

        Raises:
            Unusable: the blob is damaged, or another one than was asked for.
        """

    def write(self, blocks: Tensor, first: int, staged: Tensor, kept: list[KeptRows]) -> None:
        """Ask the device to fill the blocks; those with an id below zero are left alone."""


class RawStagingLayout:
    """Raw rows: K and V of each layer, one after the other, as ``RawCodec`` has them."""

    def __init__(self, groups: Sequence[KVViewGroup], packer: Packer, num_tokens: int) -> None:
        self._groups = groups
        self._packer = packer
        self._num_tokens = num_tokens
        self.nbytes = packer.layout.bytes_per_token * num_tokens
        lengths = [0] * sum(len(x.side_numbers) for x in groups)
        for group in groups:
            for number in group.side_numbers:
                lengths[number] = group.num_elements(num_tokens)
        starts = np.cumsum([0, *lengths])
        self._offsets = [_table(starts[list(x.side_numbers)], x) for x in groups]

    def read(self, blocks: Tensor, first: int, staged: Tensor) -> None:
        for group, offsets in zip(self._groups, self._offsets, strict=True):
            gather(group, blocks, first, self._num_tokens, staged, offsets)

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        return b""

    def seal(self, span: BlobSpan, first_token: int, staged: np.ndarray, rescued: bytes) -> bytes:
        pack = self._packer.pack_tail if span.is_tail else self._packer.pack_chunk
        return pack(span.key, self._run(staged), first_token)

    def open(
        self, blob: AnyBlob, span: BlobSpan, first_token: int, staged: np.ndarray
    ) -> list[KeptRows]:
        unpack = self._packer.unpack_tail if span.is_tail else self._packer.unpack_chunk
        unpack(blob, span.key, first_token, self._num_tokens, self._run(staged))
        return []

    def write(self, blocks: Tensor, first: int, staged: Tensor, kept: list[KeptRows]) -> None:
        for group, offsets in zip(self._groups, self._offsets, strict=True):
            scatter(group, blocks, first, self._num_tokens, staged, offsets)

    def _run(self, staged: np.ndarray) -> list[KVPair]:
        return layer_views(staged, self._packer.layout, self._num_tokens)


class PackedStagingLayout:
    """A payload of rotated rows (``kvstore.codecs.rows.payload``), without its kept rows."""

    def __init__(
        self,
        groups: Sequence[KVViewGroup],
        kernels: Sequence[TritonRows],
        packer: Packer,
        plan: PayloadPlan,
        num_tokens: int,
    ) -> None:
        assert isinstance(packer.codec, RowCodec)
        self._groups = groups
        self._kernels = kernels
        self._packer = packer
        self._codec = packer.codec
        self._plan = plan
        self._num_tokens = num_tokens
        self.nbytes = plan.nbytes
        slots = [[plan.slots[i] for i in x.side_numbers] for x in groups]
        rows = [[(s.packed_at, s.scales_at // 2) for s in x] for x in slots]
        self._rows = [_table(np.array(x), group) for x, group in zip(rows, groups, strict=True)]
        sinks = [[s.sinks_at // 2 for s in x] for x in slots]
        self._sinks = [_table(np.array(x), group) for x, group in zip(sinks, groups, strict=True)]

    def read(self, blocks: Tensor, first: int, staged: Tensor) -> None:
        behind = first + self._plan.num_sinks
        for i, group in enumerate(self._groups):
            if self._plan.num_sinks:
                gather(group, blocks, first, self._plan.num_sinks, staged, self._sinks[i])
            if self._num_packed:
                self._kernels[i].pack(
                    group, blocks, behind, self._num_packed, staged, self._rows[i]
                )

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        found = []
        for number, rows in self._plan.split_rows(self._plan.kept_rows(staged)):
            slot = self._plan.slots[number]
            slot.packed(staged)[rows] = 0
            values = self._view(number)[self._at(number, block_ids, *slot.positions(rows))]
            found.append(values.cpu().numpy().tobytes())
        return b"".join(found)

    def seal(self, span: BlobSpan, first_token: int, staged: np.ndarray, rescued: bytes) -> bytes:
        payload = b"".join((staged.data, rescued)) if rescued else staged.data
        return self._packer.seal_chunk(
            span.key, payload, first_token, self._num_tokens, self._codec
        )

    def open(
        self, blob: AnyBlob, span: BlobSpan, first_token: int, staged: np.ndarray
    ) -> list[KeptRows]:
        payload = self._packer.open_chunk(
            blob, span.key, first_token, self._num_tokens, self._codec
        )
        view = np.frombuffer(payload, np.uint8)
        kept = self._codec.check_payload(view, self._plan)
        staged[:] = view[: self.nbytes]
        return self._kept(kept, view)

    def write(self, blocks: Tensor, first: int, staged: Tensor, kept: list[KeptRows]) -> None:
        behind = first + self._plan.num_sinks
        for i, group in enumerate(self._groups):
            if self._plan.num_sinks:
                scatter(group, blocks, first, self._plan.num_sinks, staged, self._sinks[i])
            if self._num_packed:
                self._kernels[i].unpack(
                    group, blocks, behind, self._num_packed, staged, self._rows[i]
                )
        for rows in kept:
            self._put(rows, blocks, first)

    @property
    def _num_packed(self) -> int:
        return self._num_tokens - self._plan.num_sinks

    def _kept(self, kept: np.ndarray, payload: np.ndarray) -> list[KeptRows]:
        at, found = self.nbytes, []
        for number, rows in self._plan.split_rows(kept):
            slot = self._plan.slots[number]
            end = at + len(rows) * slot.dim * KEPT_DTYPE.itemsize
            values = payload[at:end].view(KEPT_DTYPE).reshape(len(rows), slot.dim).copy()
            found.append(KeptRows(number, *slot.positions(rows), values))
            at = end
        return found

    def _put(self, rows: KeptRows, blocks: Tensor, first: int) -> None:
        view = self._view(rows.side)
        tokens = torch.from_numpy(rows.tokens).to(view.device) + first
        heads = torch.from_numpy(rows.heads).to(view.device)
        values = torch.from_numpy(rows.values.view(np.int16)).to(view.device)
        ids = blocks[tokens // view.shape[2]]
        wanted = ids >= 0
        where = (ids[wanted], heads[wanted], tokens[wanted] % view.shape[2])
        view.index_put_(where, values[wanted])

    def _at(
        self, number: int, block_ids: Sequence[int], heads: np.ndarray, tokens: np.ndarray
    ) -> tuple[Tensor, Tensor, Tensor]:
        view = self._view(number)
        blocks = np.array(block_ids)[tokens // view.shape[2]]
        found = [torch.from_numpy(x) for x in (blocks, heads, tokens % view.shape[2])]
        return found[0].to(view.device), found[1].to(view.device), found[2].to(view.device)

    def _view(self, number: int) -> Tensor:
        group = next(x for x in self._groups if number in x.side_numbers)
        return group.views[group.side_numbers.index(number)]


def layer_views(staged: np.ndarray, layout: KVLayout, num_tokens: int) -> list[KVPair]:
    """View ``staged``, uint8, as K and V of each layer, (num_kv_heads, num_tokens, dim)."""
    at, arrays = 0, []
    for layer in layout.layers:
        for dim in (layer.head_dim, layer.value_dim):
            shape = (layer.num_kv_heads, num_tokens, dim)
            end = at + int(np.prod(shape)) * layout.numpy_dtype.itemsize
            arrays.append(staged[at:end].view(layout.numpy_dtype).reshape(shape))
            at = end
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def _table(numbers: np.ndarray, group: KVViewGroup) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int64)).to(group.starts.device)
