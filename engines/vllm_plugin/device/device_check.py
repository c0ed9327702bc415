"""Chooses the device's kernels to pack and fill blocks if they agree with the host, else the host.

Before the first request, and when another codec is adopted, the kernels pack and fill a small
cache of the engine's own shapes, which also compiles them. Every bit must equal the result of the
host's codec. A kernel or a compiler that fails costs only speed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from engines.vllm_plugin.blocks.block_layout import StridedView
from engines.vllm_plugin.blocks.blocks import Blocks, Filling, Packing
from engines.vllm_plugin.blocks.host_blocks import SPARE_BYTES, HostBlocks
from engines.vllm_plugin.blocks.paging import PagedCache
from engines.vllm_plugin.device.accelerator import Accelerator, NoStream, accelerator_of
from engines.vllm_plugin.device.checked_blocks import (
    CheckedBlocks,
    DeviceTransfer,
    KernelsUnusable,
)
from engines.vllm_plugin.device.scratch_cache import scratch_for
from kvstore.blobs.packer import Packer
from kvstore.config import StoreConfig
from kvstore.store.block_keys import BlockKeys
from kvstore.store.block_store import BlockStore

logger = logging.getLogger("thermocline.vllm")

STAGING_BYTES: Final = 64 << 20  # for each direction


def blocks_for(cache: PagedCache, store: BlockStore, spare_bytes: int = SPARE_BYTES) -> Blocks:
    """Choose the host for a cache in host memory; on CUDA, the kernels if they work."""
    accelerator = accelerator_of(cache.device)
    if accelerator is None:
        return HostBlocks(cache, store, NoStream(), spare_bytes)
    return blocks_on(accelerator, cache, store, spare_bytes)


def blocks_on(
    accelerator: Accelerator, cache: PagedCache, store: BlockStore, spare_bytes: int = SPARE_BYTES
) -> Blocks:
    """Choose the kernels of this device if they work, else the host."""
    on_host = partial(HostBlocks, cache, store, accelerator.stream(), spare_bytes)
    prove = partial(proven_blocks, accelerator, cache, store)
    try:
        return CheckedBlocks(prove(), on_host(), store, prove)
    except Exception as error:  # a compiler, a driver, a full device: errors of any kind
        reason = str(error) if isinstance(error, KernelsUnusable) else f"{error!r}"
        logger.warning("KV is packed by the host, slower: %s", reason)
        return on_host(why_host=reason)


def proven_blocks(accelerator: Accelerator, cache: PagedCache, store: BlockStore) -> DeviceTransfer:
    """Make the device's transfer for the store's present codec, and check it.

    May run on any thread: it uses a stream of its own.

    Raises:
        KernelsUnusable: the host has to pack this codec. Errors of any other kind may be over when
            it is tried again.
    """
    try:
        with accelerator.apart():
            on_device = device_blocks(accelerator, cache, store)
            if on_device is not None and kernels_agree(accelerator, cache, store):
                return on_device
    except ImportError as error:
        raise KernelsUnusable(str(error)) from error
    reason = "the kernels cannot address this cache" if on_device is None else "they are wrong"
    raise KernelsUnusable(reason)


def device_blocks(
    accelerator: Accelerator,
    cache: PagedCache,
    store: BlockStore,
    staging_bytes: int = STAGING_BYTES,
) -> DeviceTransfer | None:
    """Make the device's transfer; None if kernels cannot address the cache.

    Raises:
        ImportError: Triton is not installed.
    """
    from engines.vllm_plugin.device.device_blocks import DeviceBlocks
    from engines.vllm_plugin.device.kv_views import view_groups
    from engines.vllm_plugin.device.layouts.layout_choice import StagingLayouts

    groups = view_groups(cache)
    if groups is None:
        return None
    layouts = StagingLayouts(groups, store.packer, cache.dtype)
    return DeviceBlocks(cache, layouts.of, store, accelerator, staging_bytes)


def kernels_agree(accelerator: Accelerator, cache: PagedCache, store: BlockStore) -> bool:
    """Say whether kernels and host make the same blobs and fill blocks with the same bits."""
    chunk, per_block = store.keys.chunk_blocks, store.keys.block_tokens
    codec = store.packer.codec
    scratch = scratch_for(codec, cache, 2 * chunk + 1)
    keys = BlockKeys("", per_block, chunk)
    packer = Packer(codec, scratch.layout, "")
    aside = BlockStore(StoreConfig(num_threads=1), packer, keys, [])
    try:
        on_device = device_blocks(accelerator, scratch, aside, staging_bytes=0)
        on_host = HostBlocks(scratch, aside, accelerator.stream())
        return on_device is not None and _same(scratch, keys, on_device, on_host)
    finally:
        aside.close()


def _same(scratch: PagedCache, keys: BlockKeys, one: DeviceTransfer, other: DeviceTransfer) -> bool:
    """Compare both ways on two chunks and a tail: pack them, then fill other blocks with the blobs.

    The first chunk contains the session's first tokens, which are not packed.
    """
    hashes = [bytes([i % 256]) * 32 for i in range(2 * keys.chunk_blocks + 1)]
    spans, ids = keys.whole(hashes), list(range(len(hashes)))
    wanted = [Packing(x, ids[x.first_block : x.end_block]) for x in spans]
    blobs, expected = ([x.result() for x in way.pack(wanted, way.mark())] for way in (one, other))
    if blobs != expected:
        return False
    back = [
        Filling(x, blob, 0, ids[::-1][x.first_block : x.end_block])
        for x, blob in zip(spans, blobs, strict=True)
    ]
    found, right = (_filled(scratch, way, back) for way in (one, other))
    return all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def _filled(scratch: PagedCache, way: DeviceTransfer, wanted: Sequence[Filling]) -> list[Tensor]:
    for view in _views(scratch):
        view.fill_(1)
    way.fill(wanted, way.mark())
    return [view.clone() for view in _views(scratch)]


def _views(cache: PagedCache) -> list[Tensor]:
    sides = [side for pair in cache.views for side in pair]
    return [side.view for side in sides if isinstance(side, StridedView)]
