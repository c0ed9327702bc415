"""Makes blobs from vLLM's blocks and fills blocks from blobs, on the device that holds them.

Saving: kernels gather rows from blocks and pack them on the device, one copy takes a fifth of the
bytes to pinned host memory, and a codec thread makes the blob. Loading: a codec thread checks a
blob and puts it into pinned memory, one copy takes it to the device, and kernels unpack it into the
blocks. Each direction has a stream of its own; no work is queued on the model's stream, and that
stream never waits (docs/decisions/0023-device-transfer.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from engines.vllm_plugin.blocks.blocks import Filling, Packing
from engines.vllm_plugin.blocks.paging import PagedCache
from engines.vllm_plugin.device.accelerator import Accelerator
from engines.vllm_plugin.device.copy_stream import CopyStream
from engines.vllm_plugin.device.device_load import DeviceLoad
from engines.vllm_plugin.device.device_save import DeviceSave
from engines.vllm_plugin.device.layouts.staging_layout import StagingLayout
from engines.vllm_plugin.device.staging import StagingRing
from kvstore.store.block_store import BlockStore
from kvstore.store.records import Span
from kvstore.tiers.base import Blob


class DeviceBlocks:
    """Implements ``checked_blocks.DeviceTransfer``.

    Args:
        layout_of: chooses the staging layout of a blob; ``StagingLayouts.of``.
        staging_bytes: for each direction; at least the size of two whole chunks is allocated.
    """

    def __init__(
        self,
        cache: PagedCache,
        layout_of: Callable[[Span], StagingLayout],
        store: BlockStore,
        accelerator: Accelerator,
        staging_bytes: int,
    ) -> None:
        self._cache = cache
        keys = store.keys
        chunk_bytes = keys.chunk_blocks * keys.block_tokens * cache.layout.bytes_per_token
        nbytes = max(staging_bytes, 2 * chunk_bytes)
        self._saving, self._loading = (
            CopyStream(
                store=store,
                layout_of=layout_of,
                ring=StagingRing(nbytes, accelerator),
                side_stream=accelerator.stream(),
                device=cache.device,
            )
            for _ in ("saving", "loading")
        )

    @property
    def block_bytes(self) -> int:
        """The size of a block of all layers, in the engine's dtype."""
        return self._cache.block_tokens * self._cache.layout.bytes_per_token

    def mark(self) -> object:
        """Remember the work queued so far on the device. Called on the model's thread."""
        return self._saving.side_stream.mark()

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[Blob]]:
        """Make blobs from blocks; see ``blocks.Blocks.pack``."""
        return DeviceSave(self._saving).run(wanted, ready) if wanted else []

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        """Fill blocks from blobs; see ``blocks.Blocks.fill``."""
        return DeviceLoad(self._loading).run(wanted, ready) if wanted else set()

    def close(self) -> None:
        """Wait until the device is done."""
        self._saving.side_stream.drain()
        self._loading.side_stream.drain()
