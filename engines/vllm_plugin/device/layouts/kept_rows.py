"""Rows that no codec can pack: fetched from the blocks, and written back into them, unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engines.vllm_plugin.device.kv_views import KVViewGroup


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
    """Convert 16-bit patterns to a side's element size: in fp32 they are the upper half."""
    if view.element_size() == 2:
        return values.view(np.int16)
    return (values.astype(np.uint32) << 16).view(np.int32)


def _view(groups: Sequence[KVViewGroup], side: int) -> Tensor:
    group = next(x for x in groups if side in x.side_numbers)
    return group.views[group.side_numbers.index(side)]
