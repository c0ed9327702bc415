"""Who moves the blocks: the device's kernels, where they prove themselves, or the host.

Whether kernels are right is not left to hope: before the first request they pack and fill a small
cache of the engine's own shapes, which also compiles them, and everything has to be what the host
makes of it, bit for bit. A kernel or a compiler that fails costs speed and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from engines.vllm_plugin.arrangement import StridedSide
from engines.vllm_plugin.checked_blocks import CheckedBlocks, DeviceWay
from engines.vllm_plugin.host_blocks import SPARE_BYTES, HostBlocks
from engines.vllm_plugin.paging import PagedCache
from engines.vllm_plugin.streams import SideStream
from engines.vllm_plugin.transfer import Blocks, Filling, Packing
from kvstore.block_keys import BlockKeys
from kvstore.block_store import BlockStore
from kvstore.config import StoreConfig
from kvstore.packer import Packer
from kvstore.shapes import KVLayer, KVLayout

logger = logging.getLogger("thermocline.vllm")

STAGING_BYTES: Final = 64 << 20  # for each direction


def blocks_for(cache: PagedCache, store: BlockStore, spare_bytes: int = SPARE_BYTES) -> Blocks:
    """Memory of the host is the host's business; on a device, kernels that work."""
    on_host = HostBlocks(cache, store, SideStream(cache.device), spare_bytes)
    if cache.device.type != "cuda":
        return on_host
    try:
        on_device = device_blocks(cache, store)
        if on_device is not None and agree(cache, store):
            return CheckedBlocks(on_device, on_host, store)
        reason = "the kernels cannot address this cache" if on_device is None else "they are wrong"
    except Exception as error:  # of a compiler, a driver, a missing package: any kind
        reason = f"{type(error).__name__}: {error}"
    logger.warning("KV is packed by the host, slower: %s", reason)
    return on_host


def device_blocks(
    cache: PagedCache, store: BlockStore, staging_bytes: int = STAGING_BYTES
) -> DeviceWay | None:
    """None if kernels cannot address the cache. Raises ``ImportError`` without Triton."""
    from engines.vllm_plugin.device_blocks import DeviceBlocks
    from engines.vllm_plugin.device_sides import side_groups

    groups = side_groups(cache)
    return None if groups is None else DeviceBlocks(cache, groups, store, staging_bytes)


def agree(cache: PagedCache, store: BlockStore) -> bool:
    """Do kernels and host make the same blobs, and fill blocks with the same bits?"""
    chunk, per_block = store.keys.chunk_blocks, store.keys.block_tokens
    scratch = scratch_of(cache, 2 * chunk + 1)
    codec = store.packer.codec
    keys = BlockKeys("", per_block, chunk)
    packer = Packer(codec, scratch.layout, "")
    aside = BlockStore(StoreConfig(num_threads=1), packer, keys, "", [])
    try:
        on_device = device_blocks(scratch, aside, staging_bytes=0)
        on_host = HostBlocks(scratch, aside, SideStream(cache.device))
        return on_device is not None and _same(scratch, keys, on_device, on_host)
    finally:
        aside.close()


def _same(scratch: PagedCache, keys: BlockKeys, one: DeviceWay, other: DeviceWay) -> bool:
    """Two chunks, the first with the session's first tokens, and a tail, into blocks elsewhere."""
    hashes = [bytes([i % 256]) * 32 for i in range(2 * keys.chunk_blocks + 1)]
    pieces, ids = keys.whole(hashes), list(range(len(hashes)))
    wanted = [Packing(x, ids[x.first_block : x.end_block]) for x in pieces]
    blobs, expected = ([x.result() for x in way.pack(wanted, way.mark())] for way in (one, other))
    if blobs != expected:
        return False
    back = [
        Filling(x, blob, 0, ids[::-1][x.first_block : x.end_block])
        for x, blob in zip(pieces, blobs, strict=True)
    ]
    found, right = (_filled(scratch, way, back) for way in (one, other))
    return all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def _filled(scratch: PagedCache, way: DeviceWay, wanted: Sequence[Filling]) -> list[Tensor]:
    for view in _views(scratch):
        view.fill_(1)
    way.fill(wanted, way.mark())
    return [view.clone() for view in _views(scratch)]


def scratch_of(cache: PagedCache, num_blocks: int) -> PagedCache:
    """One layer of each kind, with the shapes and strides of the real ones, and numbers in it."""
    kinds = {(_kind(k), _kind(v)): (k, v) for k, v in cache.sides}
    sides = [(_filled_like(k, num_blocks), _filled_like(v, num_blocks)) for k, v in kinds.values()]
    layers = tuple(KVLayer(k.shape[0], k.shape[2], v.shape[2]) for k, v in sides)
    layout = KVLayout(cache.layout.dtype, layers)
    return PagedCache(sides, layout, cache.block_tokens, cache.device, cache.dtype)


def _kind(side: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert isinstance(side, StridedSide), "``side_groups`` takes no other"
    return tuple(side.view.shape[1:]), side.view.stride()


def _filled_like(side: object, num_blocks: int) -> StridedSide:
    assert isinstance(side, StridedSide)
    shape, strides = (num_blocks, *side.view.shape[1:]), side.view.stride()
    needed = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    room = torch.zeros(needed, dtype=side.view.dtype, device=side.view.device)
    view = room.as_strided(shape, strides)
    ramp = torch.arange(view.numel(), dtype=torch.float64).remainder(10007)
    view.copy_((ramp * ramp).sin().reshape(shape))
    view[-2, 0, 0] = 0  # a row that no kernel packs, behind the session's first tokens
    return StridedSide(view)


def _views(cache: PagedCache) -> list[Tensor]:
    sides = [side for pair in cache.sides for side in pair]
    return [side.view for side in sides if isinstance(side, StridedSide)]
