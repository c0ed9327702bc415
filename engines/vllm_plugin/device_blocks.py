"""vLLM's blocks into blobs and back, packed by the device that holds them.

Saving: kernels gather the rows of a piece out of its blocks, pack them, and write them into pinned
host memory, a fifth of the bytes; a thread of the codec makes the blob of it. Loading: a thread of
the codec checks a blob and puts it into pinned memory, one copy takes it to the device, and kernels
unpack it into the blocks. Both on streams of their own; nothing is asked of the model's stream, and
nothing there waits (docs/decisions: device transfer).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import lru_cache

import torch

from engines.vllm_plugin.device_forms import Form, PackedForm, WholeForm
from engines.vllm_plugin.device_lane import Lane
from engines.vllm_plugin.device_loading import Loading
from engines.vllm_plugin.device_saving import Saving
from engines.vllm_plugin.device_sides import SideGroup
from engines.vllm_plugin.device_staging import Staging
from engines.vllm_plugin.paging import PagedCache
from engines.vllm_plugin.streams import SideStream
from engines.vllm_plugin.transfer import Filling, Packing
from engines.vllm_plugin.triton_rows import TritonRows
from kvstore.block_keys import Piece
from kvstore.block_store import BlockStore
from kvstore.codecs.payload import NUM_SINKS, plan_payload
from kvstore.codecs.rotated_rows import RotatedRows
from kvstore.codecs.row_codec import RowCodec
from kvstore.packer import Packer


class DeviceBlocks:
    """``transfer.Blocks`` for one codec: ``checked_blocks`` knows when to ask.

    Args:
        groups: of ``cache``, by ``side_groups``.
        staging_bytes: for each direction; room for two whole chunks is always taken.
    """

    def __init__(
        self,
        cache: PagedCache,
        groups: Sequence[SideGroup],
        store: BlockStore,
        staging_bytes: int,
    ) -> None:
        self._cache = cache
        keys = store.keys
        chunk_bytes = keys.chunk_blocks * keys.block_tokens * cache.layout.bytes_per_token
        nbytes = max(staging_bytes, 2 * chunk_bytes)
        forms = Forms(groups, store.packer, keys.block_tokens, cache.dtype)
        launching = threading.Lock()
        self._saving, self._loading = (
            Lane(
                store=store,
                form_of=forms.of,
                ring=Staging(nbytes, cache.device, mirrored=mirrored),
                stream=SideStream(cache.device),
                device=cache.device,
                launching=launching,
            )
            for mirrored in (False, True)
        )

    @property
    def block_bytes(self) -> int:
        return self._cache.block_tokens * self._cache.layout.bytes_per_token

    def mark(self) -> object:
        return self._saving.stream.mark()

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[bytes]]:
        return Saving(self._saving).run(wanted, ready) if wanted else []

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        return Loading(self._loading).run(wanted, ready) if wanted else set()

    def close(self) -> None:
        self._saving.stream.drain()
        self._loading.stream.drain()


class Forms:
    """The form of each piece. There are few: by length, and whether the sinks are in it."""

    def __init__(
        self, groups: Sequence[SideGroup], packer: Packer, block_tokens: int, dtype: torch.dtype
    ) -> None:
        self._groups = groups
        self._packer = packer
        self._block_tokens = block_tokens
        self._kernels = kernels_for(groups, packer, dtype)
        self._whole = lru_cache(maxsize=None)(self._new_whole)
        self._packed = lru_cache(maxsize=None)(self._new_packed)

    def of(self, piece: Piece) -> Form:
        tokens = piece.num_blocks * self._block_tokens
        if piece.is_tail or self._kernels is None:
            return self._whole(tokens)
        return self._packed(tokens, min(piece.first_block * self._block_tokens, NUM_SINKS))

    def _new_whole(self, num_tokens: int) -> Form:
        return WholeForm(self._groups, self._packer, num_tokens)

    def _new_packed(self, num_tokens: int, first_token: int) -> Form:
        codec = self._packer.codec
        assert isinstance(codec, RowCodec)
        assert self._kernels is not None
        plan = plan_payload(codec.rows, self._packer.layout, num_tokens, first_token)
        return PackedForm(self._groups, self._kernels, self._packer, plan, num_tokens)


def kernels_for(
    groups: Sequence[SideGroup], packer: Packer, dtype: torch.dtype
) -> list[TritonRows] | None:
    """One for each group; None if the codec has none, or not for these rows."""
    codec = packer.codec
    if not isinstance(codec, RowCodec) or not isinstance(codec.rows, RotatedRows):
        return None
    if not all(TritonRows.supports(codec.rows, x.dim, dtype) for x in groups):
        return None
    return [TritonRows(codec.rows, x.dim, dtype, x.starts.device) for x in groups]
