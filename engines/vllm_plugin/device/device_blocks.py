"""Makes blobs of vLLM's blocks and fills blocks out of blobs, on the device that holds them.

Saving: kernels gather rows out of blocks, pack them and write them into pinned host memory, a fifth
of the bytes; a codec thread makes the blob. Loading: a codec thread checks a blob and puts it into
pinned memory, one copy takes it to the device, and kernels unpack it into the blocks. Each
direction has a stream of its own; nothing is asked of the model's stream, and nothing there waits
(docs/decisions: device transfer).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache

import torch

from engines.vllm_plugin.device.copy_stream import CopyStream
from engines.vllm_plugin.device.device_load import DeviceLoad
from engines.vllm_plugin.device.device_save import DeviceSave
from engines.vllm_plugin.device.kv_views import KVViewGroup
from engines.vllm_plugin.device.side_stream import SideStream
from engines.vllm_plugin.device.staging import StagingRing
from engines.vllm_plugin.device.staging_layout import (
    PackedStagingLayout,
    RawStagingLayout,
    StagingLayout,
)
from engines.vllm_plugin.device.triton_rows import TritonRows
from engines.vllm_plugin.worker.paging import PagedCache
from engines.vllm_plugin.worker.transfer import Filling, Packing
from kvstore.blobs.packer import Packer
from kvstore.by_blocks.names import BlobSpan
from kvstore.by_blocks.store import BlockStore
from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.rows.payload import plan_payload
from kvstore.codecs.rows.rotated_rows import RotatedRows
from kvstore.codecs.rows.row_codec import RowCodec


class DeviceBlocks:
    """Implements ``checked_blocks.DeviceTransfer``.

    Args:
        layout_of: chooses the staging layout of a blob; ``StagingLayouts.of``.
        staging_bytes: for each direction; room for two whole chunks is always taken.
    """

    def __init__(
        self,
        cache: PagedCache,
        layout_of: Callable[[BlobSpan], StagingLayout],
        store: BlockStore,
        staging_bytes: int,
    ) -> None:
        self._cache = cache
        keys = store.keys
        chunk_bytes = keys.chunk_blocks * keys.block_tokens * cache.layout.bytes_per_token
        nbytes = max(staging_bytes, 2 * chunk_bytes)
        launching = threading.Lock()
        self._saving, self._loading = (
            CopyStream(
                store=store,
                layout_of=layout_of,
                ring=StagingRing(nbytes, cache.device, mirrored=mirrored),
                side_stream=SideStream(cache.device),
                device=cache.device,
                launching=launching,
            )
            for mirrored in (False, True)
        )

    @property
    def block_bytes(self) -> int:
        """The size of a block of all layers, in the engine's dtype."""
        return self._cache.block_tokens * self._cache.layout.bytes_per_token

    def mark(self) -> object:
        """Remember what has been asked of the device so far, on the model's thread."""
        return self._saving.side_stream.mark()

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[bytes]]:
        """Make blobs of blocks; see ``transfer.Blocks.pack``."""
        return DeviceSave(self._saving).run(wanted, ready) if wanted else []

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        """Fill blocks out of blobs; see ``transfer.Blocks.fill``."""
        return DeviceLoad(self._loading).run(wanted, ready) if wanted else set()

    def close(self) -> None:
        """Wait until the device is done."""
        self._saving.side_stream.drain()
        self._loading.side_stream.drain()


class StagingLayouts:
    """Makes the staging layouts of blobs, one for each length and number of first tokens in it."""

    def __init__(
        self, groups: Sequence[KVViewGroup], packer: Packer, block_tokens: int, dtype: torch.dtype
    ) -> None:
        self._groups = groups
        self._packer = packer
        self._block_tokens = block_tokens
        self._kernels = kernels_for(groups, packer, dtype)
        self._raw = lru_cache(maxsize=None)(self._new_raw)
        self._packed = lru_cache(maxsize=None)(self._new_packed)

    def of(self, span: BlobSpan) -> StagingLayout:
        """Return the layout of a blob; the same object for blobs of one length and position."""
        tokens = span.num_blocks * self._block_tokens
        if span.is_tail or self._kernels is None:
            return self._raw(tokens)
        return self._packed(tokens, min(span.first_block * self._block_tokens, NUM_SINKS))

    def _new_raw(self, num_tokens: int) -> StagingLayout:
        return RawStagingLayout(self._groups, self._packer, num_tokens)

    def _new_packed(self, num_tokens: int, first_token: int) -> StagingLayout:
        codec = self._packer.codec
        assert isinstance(codec, RowCodec)
        assert self._kernels is not None
        plan = plan_payload(codec.rows, self._packer.layout, num_tokens, first_token)
        return PackedStagingLayout(self._groups, self._kernels, self._packer, plan, num_tokens)


def kernels_for(
    groups: Sequence[KVViewGroup], packer: Packer, dtype: torch.dtype
) -> list[TritonRows] | None:
    """Return kernels for each group; None if the codec has none, or not for these rows."""
    codec = packer.codec
    if not isinstance(codec, RowCodec) or not isinstance(codec.rows, RotatedRows):
        return None
    if not all(TritonRows.supports(codec.rows, x.dim, dtype) for x in groups):
        return None
    return [TritonRows(codec.rows, x.dim, dtype, x.starts.device) for x in groups]
