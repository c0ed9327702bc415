"""Chooses the device's kernels to pack and fill blocks if they agree with the host, else the host.

Before the first request, and when another codec is adopted, the kernels pack and fill a small
cache of the engine's own shapes, which also compiles them. Every bit must equal the result of the
host's codec. If a kernel or a compiler fails, the host does the work, only slower.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from engines.vllm_plugin.blocks.block_layout import KVView, StridedView
from engines.vllm_plugin.blocks.blocks import Blocks, Filling, Packing
from engines.vllm_plugin.blocks.host_blocks import SPARE_BYTES, HostBlocks
from engines.vllm_plugin.blocks.paging import PagedCache
from engines.vllm_plugin.device.accelerator import Accelerator, NoStream, accelerator_of
from engines.vllm_plugin.device.checked_blocks import CheckedBlocks, DeviceTransfer, KernelsUnusable
from kvstore.blobs.chain import NAME_BYTES, ChainKeys
from kvstore.codecs.base import NUM_SINKS, Codec
from kvstore.codecs.rows.sinks import squeezes
from kvstore.config import StoreConfig
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayer, KVLayout, StoredModel
from kvstore.store.cold_store import ColdStore

logger = logging.getLogger("thermocline.vllm")
STAGING_BYTES: Final = 64 << 20  # for each direction
NUM_CHUNKS: Final = 2  # chunks that are compared


def scratch_for(codec: Codec, cache: PagedCache, num_blocks: int) -> PagedCache:
    """Return a new cache of few blocks that ``codec`` can pack.

    It has one layer of each kind. It has more if the session's first tokens need them to get a part
    of their own in the payload, as in the real cache. It has all layers if the codec was calibrated
    for this model.
    """
    numbers = {(_kind(k), _kind(v)): i for i, (k, v) in enumerate(cache.views)}
    chosen = set(numbers.values())
    for number in range(len(cache.views)):
        scratch = _scratch(cache, [cache.views[i] for i in sorted(chosen)], num_blocks)
        squeezed = (squeezes(x.layout, 0, NUM_SINKS + 1, codec) for x in (scratch, cache))
        if next(squeezed) or not next(squeezed):
            break
        chosen.add(number)
    try:
        codec.check(scratch.layout)
    except UnknownCodec:
        return _scratch(cache, cache.views, num_blocks)
    return scratch


def _scratch(
    cache: PagedCache, pairs: Sequence[tuple[KVView, KVView]], num_blocks: int
) -> PagedCache:
    views = _views_like([_view(side) for pair in pairs for side in pair], num_blocks)
    for number, view in enumerate(views):
        _fill(view, number)
    sides = [StridedView(x) for x in views]
    found = list(zip(sides[::2], sides[1::2], strict=True))
    layers = tuple(KVLayer(k.shape[0], k.shape[2], v.shape[2]) for k, v in found)
    layout = KVLayout(cache.layout.dtype, layers)
    return PagedCache(found, layout, cache.block_tokens, cache.device, cache.dtype)


def _kind(side: KVView) -> tuple[tuple[int, ...], tuple[int, ...]]:
    view = _view(side)
    return tuple(view.shape[1:]), view.stride()


def _view(side: KVView) -> Tensor:
    assert isinstance(side, StridedView), "``view_groups`` takes no other"
    return side.view


@dataclass
class _Room:
    """Sides that share blocks, such as K and V, or all layers if one block contains them all.

    Their copies share memory, too: with the cache's strides, each side alone would take as much
    memory as all of them together.
    """

    origin: int  # the address of the first side
    members: list[tuple[int, Tensor]] = field(default_factory=list)

    def has_place_for(self, view: Tensor) -> bool:
        """Return whether a side lies within the first side's block."""
        _, first = self.members[0]
        alike = view.stride(0) == first.stride(0) and view.dtype == first.dtype
        return bool(alike and self.offset_of(view) + _extent(view) <= view.stride(0))

    def offset_of(self, view: Tensor) -> int:
        return int(view.data_ptr() - self.origin) // int(view.element_size())

    def copies(self, num_blocks: int) -> dict[int, Tensor]:
        """Return a copy of each side, with ``num_blocks`` blocks of zeros, by its number."""
        _, first = self.members[0]
        ends = [self.offset_of(x) + _extent(x) for _, x in self.members]
        size = (num_blocks - 1) * first.stride(0) + max(ends)
        memory = torch.zeros(size, dtype=first.dtype, device=first.device)
        return {
            number: memory.as_strided(
                (num_blocks, *x.shape[1:]), x.stride(), storage_offset=self.offset_of(x)
            )
            for number, x in self.members
        }


def _views_like(views: Sequence[Tensor], num_blocks: int) -> list[Tensor]:
    rooms: list[_Room] = []
    for number, view in sorted(enumerate(views), key=lambda x: x[1].data_ptr()):
        if not rooms or not rooms[-1].has_place_for(view):
            rooms.append(_Room(view.data_ptr()))
        rooms[-1].members.append((number, view))
    copies = {n: x for room in rooms for n, x in room.copies(num_blocks).items()}
    return [copies[number] for number in range(len(views))]


def _extent(view: Tensor) -> int:
    """Return the number of elements that one block spans."""
    outer = zip(view.shape[1:], view.stride()[1:], strict=True)
    return 1 + sum((int(n) - 1) * int(s) for n, s in outer)


def _fill(view: Tensor, number: int) -> None:
    """Fill a side with rows of many sizes, one row of zeros, and one row with an infinity."""
    ramp = torch.arange(view.numel(), dtype=torch.float64).add(number).remainder(10007)
    sizes = torch.exp2(torch.arange(view.shape[2], dtype=torch.float64) % 8 - 3)
    view.copy_((ramp * ramp).sin().reshape(view.shape) * sizes[:, None])
    # In the last blocks: the session's first tokens would not be packed.
    view[-2, 0, 0] = 0
    view[-2, -1, -1] = torch.inf


def blocks_for(cache: PagedCache, store: ColdStore, spare_bytes: int = SPARE_BYTES) -> Blocks:
    """Return the code that packs and fills a cache: its device's kernels if they work, else host's.

    A cache in host memory is always packed by the host.
    """
    accelerator = accelerator_of(cache.device)
    if accelerator is None:
        return HostBlocks(cache, store, NoStream(), spare_bytes)
    return blocks_on(accelerator, cache, store, spare_bytes)


def blocks_on(
    accelerator: Accelerator, cache: PagedCache, store: ColdStore, spare_bytes: int = SPARE_BYTES
) -> Blocks:
    """Return the code that packs and fills a cache of this device: kernels if they work, else host.

    Never raises: any failure leaves the work to the host.
    """
    on_host = partial(HostBlocks, cache, store, accelerator.stream(), spare_bytes)
    prove = partial(proven_blocks, accelerator, cache, store)
    try:
        return CheckedBlocks(prove(), on_host(), store, prove)
    except Exception as error:  # a compiler, a driver, a full device: errors of any kind
        reason = str(error) if isinstance(error, KernelsUnusable) else f"{error!r}"
        logger.warning("KV is packed by the host, slower: %s", reason)
        return on_host(why_host=reason)


def proven_blocks(accelerator: Accelerator, cache: PagedCache, store: ColdStore) -> DeviceTransfer:
    """Return the device's transfer for the store's present codec, after checking its kernels.

    May run on any thread: it uses a stream of its own.

    Raises:
        KernelsUnusable: the host has to pack this codec. An error of any other kind may be gone at
            a later attempt.
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
    store: ColdStore,
    staging_bytes: int = STAGING_BYTES,
) -> DeviceTransfer | None:
    """Return the device's transfer, unchecked; None if kernels cannot address the cache.

    Raises:
        ImportError: Triton is not installed.
    """
    from engines.vllm_plugin.device.device_blocks import DeviceBlocks
    from engines.vllm_plugin.device.kv_views import view_groups
    from engines.vllm_plugin.device.packed_layout import StagingLayouts

    groups = view_groups(cache)
    if groups is None:
        return None
    layouts = StagingLayouts(groups, store.packer, cache.dtype)
    return DeviceBlocks(cache, layouts.of, store, accelerator, staging_bytes)


def kernels_agree(accelerator: Accelerator, cache: PagedCache, store: ColdStore) -> bool:
    """Return whether kernels and host make the same blobs and fill blocks with the same bits."""
    size, codec = store.chunk_tokens, store.packer.codec
    scratch = scratch_for(codec, cache, NUM_CHUNKS * size // cache.block_tokens)
    model = StoredModel("", "", scratch.layout)
    aside = ColdStore(StoreConfig(), model, codec, [], chunk_tokens=size)
    try:
        on_device = device_blocks(accelerator, scratch, aside, staging_bytes=0)
        on_host = HostBlocks(scratch, aside, accelerator.stream())
        return on_device is not None and _same(scratch, aside.keys, on_device, on_host)
    finally:
        aside.close()


def _same(scratch: PagedCache, keys: ChainKeys, one: DeviceTransfer, other: DeviceTransfer) -> bool:
    """Return whether two transfers pack a few chunks, and fill other blocks with them, alike.

    The first chunk contains the session's first tokens, which are not packed.
    """
    pieces = keys.chunks([bytes([i]) * NAME_BYTES for i in range(NUM_CHUNKS)])
    count = keys.chunk_tokens // scratch.block_tokens
    ids = list(range(NUM_CHUNKS * count))
    places = [slice(i * count, (i + 1) * count) for i in range(NUM_CHUNKS)]
    wanted = [Packing(x, ids[place]) for x, place in zip(pieces, places, strict=True)]
    blobs, expected = ([x.result() for x in way.pack(wanted, way.mark())] for way in (one, other))
    if blobs != expected:
        return False
    back = [
        Filling(x, blob, 0, ids[::-1][place])
        for x, blob, place in zip(pieces, blobs, places, strict=True)
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
