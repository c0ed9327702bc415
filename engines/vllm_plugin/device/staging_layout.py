"""The protocol of layouts of staging memory between blocks and blobs, and the layout of raw rows.

A region with a *packed* layout holds the payload, which the codec's own kernels write. For every
other blob (codec ``raw``, or a codec, dtype or head dimension without kernels) the device only
gathers and scatters rows, and the store's packer works on the region as if it were the engine's
arrays. Either way the blob has the same bytes as one that ``host_blocks`` makes. Rows that no codec
can pack are fetched from the blocks, and written back into them, unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engines.vllm_plugin.device.kernels.triton_rows import gather, scatter
from engines.vllm_plugin.device.kv_views import KVViewGroup
from kvstore.blobs.chain import Piece
from kvstore.blobs.packer import AnyBlob, Packer
from kvstore.shapes import KVLayout, KVPair
from kvstore.tiers.base import Blob


@dataclass(frozen=True)
class KeptRows:
    """Rows of one side that cannot be packed and are kept as they are.

    Attributes:
        side: the number of the side among all sides, as in ``KVViewGroup``.
        heads: int64 (num_rows,).
        tokens: int64 (num_rows,), counted from the blob's first token.
        values: uint16 (num_rows, dim), bit patterns; fp32 values are stored as bf16.
    """

    side: int
    heads: np.ndarray
    tokens: np.ndarray
    values: np.ndarray


def fetch_rows(
    groups: Sequence[KVViewGroup],
    side: int,
    block_ids: Sequence[int],
    heads: np.ndarray,
    tokens: np.ndarray,
) -> np.ndarray:
    """Fetch rows of a side from the blocks of a blob; waits for the device.

    ``heads``, ``tokens``: int64 (num_rows,), as in ``KeptRows``. Returns bit patterns
    (num_rows, dim), int16 or int32 as in ``KVViewGroup``.
    """
    view = _view(groups, side)
    blocks = np.array(block_ids)[tokens // view.shape[2]]
    at = (torch.from_numpy(x).to(view.device) for x in (blocks, heads, tokens % view.shape[2]))
    rows: np.ndarray = view[tuple(at)].cpu().numpy()
    return rows


def put_rows(groups: Sequence[KVViewGroup], rows: KeptRows, blocks: Tensor, first: int) -> None:
    """Queue the writes of rows into the blocks of a run; see ``StagingLayout.write``."""
    view = _view(groups, rows.side)
    tokens = torch.from_numpy(rows.tokens).to(view.device) + first
    heads = torch.from_numpy(rows.heads).to(view.device)
    values = torch.from_numpy(_elements(rows.values, view)).to(view.device)
    ids = blocks[tokens // view.shape[2]]
    wanted = ids >= 0
    where = (ids[wanted], heads[wanted], tokens[wanted] % view.shape[2])
    view.index_put_(where, values[wanted])


def _elements(values: np.ndarray, view: Tensor) -> np.ndarray:
    """Return 16-bit patterns at a side's element size: in fp32 they are the upper half."""
    if view.element_size() == 2:
        return values.view(np.int16)
    return (values.astype(np.uint32) << 16).view(np.int32)


def _view(groups: Sequence[KVViewGroup], side: int) -> Tensor:
    group = next(x for x in groups if side in x.side_numbers)
    return group.views[group.side_numbers.index(side)]


@dataclass(frozen=True, eq=False)
class TokenRun:
    """The tokens of one blob among those of a save or load.

    Attributes:
        blocks: the ids of the blocks of all these tokens, int64 (num_blocks,) on the device.
        first: the index among these tokens of the blob's first token.
        position: the position of that token in its session.
    """

    blocks: Tensor
    first: int
    position: int


class StagingLayout(Protocol):
    """The layout of all blobs of one length and position; thread-safe, without state.

    An array ``staged`` is the part of a region for one blob, uint8 (nbytes,). A tensor ``staged``
    has one row for each of several consecutive blobs, uint8 (num_blobs, nbytes).
    """

    @property
    def nbytes(self) -> int:
        """The size of a blob's part of a region."""

    @property
    def takes_many(self) -> bool:
        """True if one call of ``read`` or ``write`` may handle several blobs."""

    def read(self, run: TokenRun, staged: Tensor) -> None:
        """Queue the work that fills ``staged`` from the blocks; ``run``: of the first blob."""

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        """Return the rows that the device could not pack; called before the blocks are reused."""

    def seal(self, piece: Piece, staged: np.ndarray, rescued: bytes) -> Blob:
        """Make a blob from its part of a region and the rescued rows. On any thread."""

    def open(self, blob: AnyBlob, piece: Piece, staged: np.ndarray) -> list[KeptRows]:
        """Fill the part from a blob; return the rows that it cannot hold. On any thread.

        Raises:
            Unusable: the blob is damaged, or is not the one that ``piece`` names.
        """

    def write(self, run: TokenRun, staged: Tensor) -> None:
        """Queue the work that fills the blocks from ``staged``; ids below zero are skipped."""

    def write_kept(self, run: TokenRun, kept: list[KeptRows]) -> None:
        """Queue the writes of the rows of one blob that its part cannot hold."""


def device_table(numbers: npt.ArrayLike, group: KVViewGroup) -> Tensor:
    """Copy numbers to the device of a group, as int64 of the same shape."""
    return torch.from_numpy(np.array(numbers, np.int64)).to(group.starts.device)


class RawStagingLayout:
    """The layout of raw rows: K and V of each layer in turn, in the order of ``RawCodec``."""

    takes_many = False

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
        self._offsets = [device_table(starts[list(x.side_numbers)], x) for x in groups]

    def read(self, run: TokenRun, staged: Tensor) -> None:
        for group, offsets in zip(self._groups, self._offsets, strict=True):
            gather(group, run.blocks, run.first, self._num_tokens, staged[0], offsets)

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        return b""

    def seal(self, piece: Piece, staged: np.ndarray, rescued: bytes) -> Blob:
        return self._packer.pack_rows(piece, self.rows(staged))

    def open(self, blob: AnyBlob, piece: Piece, staged: np.ndarray) -> list[KeptRows]:
        self._packer.unpack_rows(blob, piece, self.rows(staged))
        return []

    def write(self, run: TokenRun, staged: Tensor) -> None:
        for group, offsets in zip(self._groups, self._offsets, strict=True):
            scatter(group, run.blocks, run.first, self._num_tokens, staged[0], offsets)

    def write_kept(self, run: TokenRun, kept: list[KeptRows]) -> None:
        """Do nothing: a region holds any row."""

    def rows(self, staged: np.ndarray) -> list[KVPair]:
        """Return views of the rows as the engine's arrays, (num_kv_heads, num_tokens, dim)."""
        return layer_views(staged, self._packer.layout, self._num_tokens)


def layer_views(staged: np.ndarray, layout: KVLayout, num_tokens: int) -> list[KVPair]:
    """View uint8 ``staged`` as K and V of each layer, each (num_kv_heads, num_tokens, dim)."""
    at, arrays = 0, []
    for layer in layout.layers:
        for dim in (layer.head_dim, layer.value_dim):
            shape = (layer.num_kv_heads, num_tokens, dim)
            end = at + int(np.prod(shape)) * layout.numpy_dtype.itemsize
            arrays.append(staged[at:end].view(layout.numpy_dtype).reshape(shape))
            at = end
    return list(zip(arrays[::2], arrays[1::2], strict=True))
