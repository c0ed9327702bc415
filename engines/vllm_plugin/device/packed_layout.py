"""The layouts of packed rows in a staging region, and the choice of a blob's layout.

    region of a first chunk: rows of the first tokens as in ``RawStagingLayout`` | the rest
    region of any other chunk: the codec's payload

Every codec keeps the first tokens in 16 bits, in a part of their own in the payload
(``kvstore.codecs.rows.sinks``). The codec's kernels write the rest. A blob has a packed layout if
its codec has kernels, else the raw layout. A first chunk also has the raw layout if the model's
tokens are so small that the first ones have no part of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from engines.vllm_plugin.device.accelerator import rounded_up
from engines.vllm_plugin.device.kernels.triton_rows import TritonRows
from engines.vllm_plugin.device.kv_views import KVViewGroup
from engines.vllm_plugin.device.payload_layouts import (
    RatePayloadLayout,
    RowPayloadLayout,
    group_rates,
)
from engines.vllm_plugin.device.staging_layout import (
    KeptRows,
    RawStagingLayout,
    StagingLayout,
    TokenRun,
)
from kvstore.blobs.chain import Piece
from kvstore.blobs.packer import AnyBlob, Packer
from kvstore.codecs.base import NUM_SINKS, Codec
from kvstore.codecs.fixed_rate.rate_pipeline import plan_rates, rate_pipelines
from kvstore.codecs.rows import sinks
from kvstore.codecs.rows.payload import plan_payload
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.errors import Mismatch
from kvstore.tiers.base import Blob


class PayloadLayout(Protocol):
    """The payload that a codec makes, in its part of a region; thread-safe, without state.

    ``staged`` as in ``StagingLayout``.
    """

    @property
    def nbytes(self) -> int:
        """The size of its part."""

    def read(self, run: TokenRun, staged: Tensor) -> None:
        """Queue the kernels that pack the rows of the blocks."""

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        """Return the rows that the device could not pack; called before the blocks are reused."""

    def payload_of(self, staged: np.ndarray, rescued: bytes) -> bytes | memoryview:
        """Make the payload, as the codec does on the host. On any thread."""

    def stage(self, payload: memoryview, staged: np.ndarray) -> list[KeptRows]:
        """Fill the part from a payload; return the rows that it cannot hold. On any thread.

        Raises:
            Corrupt: the codec cannot have written this payload.
        """

    def write(self, run: TokenRun, staged: Tensor) -> None:
        """Queue the kernels that fill the blocks."""

    def write_kept(self, run: TokenRun, kept: list[KeptRows]) -> None:
        """Queue the writes of the rows that ``stage`` returned."""


class PackedBlockLayout:
    """Implements ``StagingLayout`` for a chunk without the first tokens of a session."""

    takes_many = True

    def __init__(self, payload: PayloadLayout, packer: Packer, codec: Codec) -> None:
        self._payload = payload
        self._packer = packer
        self._codec = codec
        self.nbytes = payload.nbytes
        self.read = payload.read
        self.rescue = payload.rescue
        self.write = payload.write
        self.write_kept = payload.write_kept

    def seal(self, piece: Piece, staged: np.ndarray, rescued: bytes) -> Blob:
        payload = self._payload.payload_of(staged, rescued)
        return self._packer.blob_of_rows(piece, payload, self._codec)

    def open(self, blob: AnyBlob, piece: Piece, staged: np.ndarray) -> list[KeptRows]:
        return self._payload.stage(opened(self._packer, blob, piece, self._codec), staged)


class FirstChunkLayout:
    """Implements ``StagingLayout`` for the first chunk of a session.

    Args:
        head: the layout of the first ``NUM_SINKS`` tokens.
        rest: the layout of the other tokens.
    """

    takes_many = False

    def __init__(
        self,
        head: RawStagingLayout,
        rest: PayloadLayout,
        packer: Packer,
        codec: Codec,
    ) -> None:
        self._head = head
        self._rest = rest
        self._packer = packer
        self._thin = sinks.ThinRows(packer.layout)
        self._codec = codec
        self._head_end: Final = rounded_up(head.nbytes)
        self.nbytes = self._head_end + rest.nbytes
        self.write_kept = rest.write_kept

    def read(self, run: TokenRun, staged: Tensor) -> None:
        self._head.read(run, staged[:, : self._head.nbytes])
        self._rest.read(run, staged[:, self._head_end :])

    def rescue(self, block_ids: Sequence[int], staged: np.ndarray) -> bytes:
        return self._rest.rescue(block_ids, staged[self._head_end :])

    def seal(self, piece: Piece, staged: np.ndarray, rescued: bytes) -> Blob:
        thin = self._thin.encode(self._head.rows(staged))
        rest = memoryview(self._rest.payload_of(staged[self._head_end :], rescued))
        return self._packer.blob_of_rows(piece, sinks.join(thin, rest), self._codec)

    def open(self, blob: AnyBlob, piece: Piece, staged: np.ndarray) -> list[KeptRows]:
        thin, rest = sinks.split(opened(self._packer, blob, piece, self._codec))
        self._thin.decode(thin, NUM_SINKS, self._head.rows(staged))
        return self._rest.stage(rest, staged[self._head_end :])

    def write(self, run: TokenRun, staged: Tensor) -> None:
        self._head.write(run, staged[:, : self._head.nbytes])
        self._rest.write(run, staged[:, self._head_end :])


def opened(packer: Packer, blob: AnyBlob, piece: Piece, codec: Codec) -> memoryview:
    """Return the payload of a blob that is in this codec.

    Raises ``Unusable``: the blob is in another codec, damaged, or not the one of ``piece``.
    """
    found, payload = packer.open_rows(blob, piece)
    if found.id != codec.id:
        raise Mismatch(f"a blob in codec {found.id!r} where {codec.id!r} is expected")
    return payload


class StagingLayouts:
    """Makes and keeps the staging layouts of blobs, by length, for first chunks and for others."""

    def __init__(self, groups: Sequence[KVViewGroup], packer: Packer, dtype: torch.dtype) -> None:
        self._groups = groups
        self._packer = packer
        self._codec = packer.codec  # kept here, because the store may adopt another codec
        self._kernels = kernels_for(groups, packer, dtype)
        self._pipelines = rate_pipelines(self._codec, packer.layout)
        self._rates = group_rates(groups, self._pipelines, dtype)
        self._raw = lru_cache(maxsize=None)(self._new_raw)
        self._packed = lru_cache(maxsize=None)(self._new_packed)
        self._first = lru_cache(maxsize=None)(self._new_first)

    def of(self, piece: Piece) -> StagingLayout:
        """Return the layout of a blob; the same object for blobs of one length and position."""
        tokens, first = piece.num_tokens, piece.first_token
        if self._kernels is None and self._rates is None:
            return self._raw(tokens)
        if first >= NUM_SINKS:
            return self._packed(tokens)
        has_head = sinks.squeezes(self._packer.layout, first, tokens, self._codec)
        return self._first(tokens) if has_head else self._raw(tokens)

    def _new_raw(self, num_tokens: int) -> RawStagingLayout:
        return RawStagingLayout(self._groups, self._packer, num_tokens)

    def _new_packed(self, num_tokens: int) -> StagingLayout:
        payload = self._payload(num_tokens, skipped=0)
        return PackedBlockLayout(payload, self._packer, self._codec)

    def _new_first(self, num_tokens: int) -> StagingLayout:
        head = self._new_raw(NUM_SINKS)
        rest = self._payload(num_tokens - NUM_SINKS, skipped=NUM_SINKS)
        return FirstChunkLayout(head, rest, self._packer, self._codec)

    def _payload(self, num_tokens: int, skipped: int) -> PayloadLayout:
        layout = self._packer.layout
        if self._rates is not None:
            rates = plan_rates(self._pipelines, layout, num_tokens, NUM_SINKS)
            return RatePayloadLayout(self._rates, layout, rates, skipped)
        codec = self._codec
        assert isinstance(codec, RowCodec)
        assert self._kernels is not None
        rows = plan_payload(codec.rows, layout, num_tokens, NUM_SINKS)
        return RowPayloadLayout(self._groups, self._kernels, codec, rows, skipped)


def kernels_for(
    groups: Sequence[KVViewGroup], packer: Packer, dtype: torch.dtype
) -> list[TritonRows] | None:
    """Return row kernels for each group; None if the codec has no kernels for these rows."""
    codec = packer.codec
    if not isinstance(codec, RowCodec) or not isinstance(codec.rows, RotatedRows):
        return None
    if not all(TritonRows.supports(codec.rows, x.dim, dtype) for x in groups):
        return None
    return [TritonRows(codec.rows, x.dim, dtype, x.starts.device) for x in groups]
