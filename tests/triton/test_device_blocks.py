"""Blocks and blobs on a device: byte for byte as the host's codec makes them, slot for slot.

In Triton's interpreter on the host's memory, or on a GPU where there is one.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the kernels need triton")

from engines.vllm_plugin.blocks.block_layout import SplitContent  # noqa: E402
from engines.vllm_plugin.blocks.blocks import Filling  # noqa: E402
from engines.vllm_plugin.blocks.host_blocks import HostBlocks  # noqa: E402
from engines.vllm_plugin.blocks.paging import paged_cache  # noqa: E402
from engines.vllm_plugin.device.checked_blocks import (  # noqa: E402
    CheckedBlocks,
    DeviceTransfer,
    KernelsUnusable,
)
from engines.vllm_plugin.device.device_check import (  # noqa: E402
    blocks_for,
    blocks_on,
    kernels_agree,
    scratch_for,
)
from engines.vllm_plugin.device.kernels.triton_rows import TritonRows  # noqa: E402
from engines.vllm_plugin.device.kv_views import view_groups  # noqa: E402
from engines.vllm_plugin.plan import Load, Save  # noqa: E402
from engines.vllm_plugin.worker.rank import StagedBlobs, StagingArea  # noqa: E402
from engines.vllm_plugin.worker.transfer import RankBlocks, Transfer  # noqa: E402
from kvstore.codecs.base import NUM_SINKS  # noqa: E402
from kvstore.codecs.presets import codec_by_name  # noqa: E402
from kvstore.codecs.rows.sinks import squeezes  # noqa: E402
from tests.block_sessions import ref  # noqa: E402
from tests.triton.rig import DEVICE, EMPTY, NUM_BLOCKS, Rig, Shape, are_equal, bits  # noqa: E402

pytestmark = pytest.mark.triton


def coded(codec: str = "tq3", **shape: Any) -> Rig:
    return Rig(Shape(**{"layers": 2} | shape), lambda layout: codec_by_name(codec))


def opened(rigs: list[Rig], **changes: Any) -> Rig:
    rigs.append(coded(**changes))
    return rigs[-1]


def no_kernels() -> DeviceTransfer:
    raise KernelsUnusable("nothing is checked here")


SHAPES = {
    "NHD": {"heads": 2},
    "HND": {"layout": "HND", "heads": 2},
    "first tokens apart": {"heads": 4},
    "first tokens apart, HND, fp16": {"heads": 4, "layout": "HND", "dtype": torch.float16},
    "HND of 16 tokens": {"layout": "HND", "block": 16},
    "blocks across layers": {"layout": "BLHNC", "heads": 2},
    "head_dim 128": {"dim": 128},
    "head_dim 256": {"dim": 256, "layers": 1},
    "fp16": {"dtype": torch.float16},
    "fp16 HND 128": {"dtype": torch.float16, "layout": "HND", "dim": 128},
    "four bits": {"codec": "tq4", "layers": 1},
    "raw": {"codec": "raw", "heads": 2},
    "raw fp32": {"codec": "raw", "dtype": torch.float32, "layout": "HND", "heads": 2},
    "fp32, packed on the host": {"dtype": torch.float32},
    "head_dim 80, packed on the host": {"dim": 80},
    "lm3, packed on the host": {"codec": "lm3"},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_host_and_the_device_make_and_read_the_same_blobs(rigs, shape):
    rig = opened(rigs, **shape)
    ids = [7, 2, 10, 4, 5, 0]
    blobs = rig.blobs(rig.device, ids)
    assert blobs == rig.blobs(rig.host, ids)

    target = [3, 9, 0, 6, 8, 1]
    wanted = rig.fillings(blobs, target)
    done, found = rig.filled(rig.device, wanted)
    assert done == set(target)
    _, expected = rig.filled(rig.host, wanted)
    assert are_equal(found, expected)
    untouched = [x for x in range(NUM_BLOCKS) if x not in target]
    empty = bits(torch.full((1,), EMPTY, dtype=rig.cache.dtype))
    assert all(bool((x[untouched] == empty).all()) for x in found)


@pytest.mark.parametrize("codec", ["tq3", "raw"])
def test_only_the_blocks_that_are_asked_for_are_written(rigs, codec):
    rig = opened(rigs, codec=codec, heads=4)
    first, second = rig.pieces(4)
    blobs = rig.blobs(rig.device, [7, 2, 10, 4])
    wanted = [Filling(first, blobs[0], 1, [9]), Filling(second, blobs[1], 0, [1])]
    done, found = rig.filled(rig.device, wanted)
    assert done == {9, 1}
    _, expected = rig.filled(rig.host, wanted)
    assert are_equal(found, expected)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_that_cannot_be_packed_are_kept_as_they_are(rigs, layout):
    rig = opened(rigs, layout=layout, heads=4)
    odd = [0.0, float("inf"), float("nan"), 1e-40, 1e30]
    for i, value in enumerate(odd):
        rig.caches["layer0"][2, 1, i, :64] = value  # keys
        rig.caches["layer1"][10, 0, 7 - i, 64:] = value  # values
        rig.caches["layer1"][7, 0, i, 64:] = value  # sinks, and one row after them
    ids, target = [7, 2, 10, 4], [3, 9, 0, 6]
    before = [bits(x)[ids] for x in rig.caches.values()]
    blobs = rig.blobs(rig.device, ids)
    assert blobs == rig.blobs(rig.host, ids)
    first, second = rig.pieces(4)
    wanted = [Filling(first, blobs[0], 0, target[:2]), Filling(second, blobs[1], 1, [6])]
    _, found = rig.filled(rig.device, wanted)
    _, expected = rig.filled(rig.host, wanted)
    assert are_equal(found, expected)
    kept = (slice(None), 1, slice(0, 5), slice(0, 64))
    assert torch.equal(found[0][target][kept][1], before[0][kept][1])


def test_a_blob_that_is_damaged_fills_nothing_and_is_never_offered_again(rigs):
    rig = opened(rigs)
    ids = [7, 2, 10, 4]
    blobs = rig.blobs(rig.device, ids)
    keys = [x.key for x in rig.pieces(4)]
    (tier,) = rig.store.ledger.stack.tiers
    tier.put_many(list(zip(keys, blobs, strict=True)))
    broken = bytearray(blobs[0])
    broken[-1] ^= 1
    wanted = rig.fillings([bytes(broken), blobs[1]], [3, 9, 0, 6])
    done, found = rig.filled(rig.device, wanted)
    assert done == {0, 6}
    empty = bits(torch.full((1,), EMPTY, dtype=rig.cache.dtype))
    assert all(bool((x[[3, 9]] == empty).all()) for x in found)
    assert tier.contains_many(keys) == [False, False]  # what continues it went with it


def test_a_payload_that_lies_about_its_rows_is_refused(rigs):
    """Sealed and of the right length, but with a scale that no kernel may be given."""
    rig = opened(rigs)
    piece, blob = rig.pieces(4)[1], rig.blobs(rig.device, [7, 2, 10, 4])[1]
    codec, honest = rig.store.packer.open_rows(blob, piece)
    payload = np.frombuffer(honest, np.uint8).copy()
    payload[:2] = 0xFF
    forged = rig.store.packer.blob_of_rows(piece, payload.data, codec)
    assert rig.filled(rig.device, [Filling(piece, forged, 0, [0, 6])])[0] == set()


def test_a_fault_in_the_middle_leaves_the_ring_whole(rigs):
    rig = opened(rigs, codec="raw")
    ids = [7, 2, 10, 4, 5, 0]
    blobs = rig.blobs(rig.device, ids)
    rig.is_broken = True
    with pytest.raises(RuntimeError, match="gone"):
        rig.device.pack(rig.packing(ids), rig.device.mark())
    rig.is_broken = False
    assert rig.blobs(rig.device, ids) == blobs


def test_saves_and_loads_at_the_same_time(rigs):
    """More chunks than the rings have room for, on three threads."""
    rig = opened(rigs, codec="raw", layers=1)
    ids = [x % NUM_BLOCKS for x in range(22)]
    blobs = rig.blobs(rig.device, ids)
    wanted = rig.fillings(blobs, ids)
    results: list[object] = []

    def save() -> None:
        results.append(len(rig.blobs(rig.device, ids)) == len(blobs))

    def load() -> None:
        results.append(rig.device.fill(wanted, rig.device.mark()) == set(ids))

    threads = [threading.Thread(target=x) for x in (save, load, load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 3


def test_a_session_sleeps_and_wakes_through_the_worker_half(rigs):
    rig = opened(rigs)
    hashes, ids, target = (
        [bytes([i]) * 32 for i in range(6)],
        [7, 2, 10, 4, 5, 0],
        [3, 9, 0, 6, 8, 1],
    )
    before = [bits(x)[ids] for x in rig.caches.values()]
    staging, saved = StagingArea(), threading.Event()
    blocks = CheckedBlocks(rig.device, rig.host, rig.store, no_kernels)
    transfer = Transfer(RankBlocks(blocks, None, rig.store, rig.shape.block), staging)
    transfer.save(Save(1, ref(), hashes, ids), lambda *_: saved.set())
    assert saved.wait(60)
    assert transfer.pop_ended().jobs == {1: False}
    for cache in rig.caches.values():
        cache.fill_(EMPTY)
    staging.expect(7)
    chain = rig.store.maker.of_blocks(hashes, rig.shape.block)
    staging.put(7, StagedBlobs(rig.store.fetch(rig.store.match(ref(), chain)), hashes))
    transfer.load(Load(7, "request", 0, target))
    assert transfer.pop_ended(60).loads == {"request": set()}
    transfer.close()
    found = [bits(x)[target] for x in rig.caches.values()]
    first = (0, slice(None), slice(0, 4))  # only the first tokens are exact
    assert all(torch.equal(a[first], b[first]) for a, b in zip(found, before, strict=True))


@pytest.mark.parametrize("codec", ["tq3", "raw"])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 4)])
def test_the_kernels_prove_themselves_before_they_are_trusted(
    rigs, codec, layers, heads, monkeypatch
):
    """Also where first tokens have a part of their own, as in every model that is in use."""
    rig = opened(rigs, codec=codec, layers=layers, heads=heads)
    assert kernels_agree(rig.accelerator, rig.cache, rig.store)
    monkeypatch.setattr(TritonRows, "pack", lambda *args: None)
    assert kernels_agree(rig.accelerator, rig.cache, rig.store) == (codec == "raw")
    blocks = blocks_on(rig.accelerator, rig.cache, rig.store)
    assert blocks.why_host == ("" if codec == "raw" else "they are wrong")
    blocks.close()


def test_the_small_cache_keeps_first_tokens_apart_where_the_real_one_has(rigs):
    for layers, heads in ((2, 1), (3, 1), (2, 4), (5, 2)):
        rig = opened(rigs, layers=layers, heads=heads)
        scratch = scratch_for(rig.store.packer.codec, rig.cache, 5)
        codec = rig.store.packer.codec
        squeezed = [squeezes(x.layout, 0, NUM_SINKS + 1, codec) for x in (scratch, rig.cache)]
        assert squeezed[0] == squeezed[1]


def test_memory_of_the_host_is_the_hosts_business(rigs):
    rig = opened(rigs)
    expected = HostBlocks if DEVICE.type == "cpu" else CheckedBlocks
    assert isinstance(blocks_for(rig.cache, rig.store), expected)


def test_a_turn_without_anything_new_asks_nothing_of_the_device(rigs):
    rig = opened(rigs)
    assert rig.device.pack([], rig.device.mark()) == []
    assert rig.device.fill([], rig.device.mark()) == set()


def test_sides_that_kernels_cannot_address_are_left_to_the_host():
    permuted = torch.zeros(4, 2, 8, 128, dtype=torch.bfloat16)
    shifted = torch.zeros(4, 2, 8, 132, dtype=torch.bfloat16)[..., 4:]
    for cache in (permuted[..., ::2], shifted):
        assert view_groups(paged_cache({"layer": cache}, SplitContent())) is None
