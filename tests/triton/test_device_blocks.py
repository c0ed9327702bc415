"""Blocks and blobs on a device: byte for byte as the host's codec makes them, slot for slot.

In Triton's interpreter on the host's memory, or on a GPU where there is one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the kernels need triton")

from engines.vllm_plugin.blocks.block_layout import SplitContent  # noqa: E402
from engines.vllm_plugin.blocks.blocks import Blocks, Filling, Packing  # noqa: E402
from engines.vllm_plugin.blocks.host_blocks import HostBlocks  # noqa: E402
from engines.vllm_plugin.blocks.paging import PagedCache, paged_cache  # noqa: E402
from engines.vllm_plugin.device.checked_blocks import (  # noqa: E402
    CheckedBlocks,
    DeviceTransfer,
    KernelsUnusable,
)
from engines.vllm_plugin.device.device_blocks import DeviceBlocks  # noqa: E402
from engines.vllm_plugin.device.device_check import (  # noqa: E402
    blocks_for,
    blocks_on,
    kernels_agree,
    scratch_for,
)
from engines.vllm_plugin.device.kernels.triton_rows import TritonRows  # noqa: E402
from engines.vllm_plugin.device.kv_views import view_groups  # noqa: E402
from engines.vllm_plugin.device.packed_layout import StagingLayouts  # noqa: E402
from engines.vllm_plugin.device.staging_layout import StagingLayout  # noqa: E402
from engines.vllm_plugin.plan import Load, Save  # noqa: E402
from engines.vllm_plugin.worker.block_rows import RankBlocks  # noqa: E402
from engines.vllm_plugin.worker.rank import StagedBlobs, StagingArea  # noqa: E402
from engines.vllm_plugin.worker.transfer import Transfer  # noqa: E402
from kvstore.blobs.chain import NAME_BYTES, Piece  # noqa: E402
from kvstore.codecs.base import NUM_SINKS  # noqa: E402
from kvstore.codecs.rows.sinks import squeezes  # noqa: E402
from tests.block_sessions import open_store, ref  # noqa: E402
from tests.lazy_device import device_here  # noqa: E402

pytestmark = pytest.mark.triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS, PER_CHUNK = 12, 2
EMPTY = 7.0  # of a block that was never written


@dataclass(frozen=True)
class Shape:
    layout: str = "NHD"
    block: int = 8
    heads: int = 1
    dim: int = 64
    layers: int = 2
    dtype: torch.dtype = torch.bfloat16
    codec: str = "tq3"


def no_kernels() -> DeviceTransfer:
    raise KernelsUnusable("nothing is checked here")


@dataclass
class Rig:
    """A cache, its store, and both ways to it."""

    shape: Shape
    caches: dict[str, torch.Tensor] = field(default_factory=dict)
    is_broken: bool = False  # after two chunks

    def __post_init__(self) -> None:
        layers = [fused(self.shape, i) for i in range(self.shape.layers)]
        if self.shape.layout == "BLHNC":
            layers = list(torch.stack(layers, 1).unbind(1))
        self.caches = {f"layer{i}": x for i, x in enumerate(layers)}
        self.cache: PagedCache = paged_cache(self.caches, SplitContent())
        self.chunk_tokens = self.shape.block * PER_CHUNK
        self.store = open_store(
            codec=self.shape.codec, layout=self.cache.layout, chunk_tokens=self.chunk_tokens
        )
        groups = view_groups(self.cache)
        assert groups is not None
        self.layouts = StagingLayouts(groups, self.store.packer, self.cache.dtype)
        self.accelerator = device_here()
        self.device = DeviceBlocks(self.cache, self.layout_of, self.store, self.accelerator, 1)
        self.host = HostBlocks(self.cache, self.store, self.accelerator.stream())

    def layout_of(self, piece: Piece) -> StagingLayout:
        if self.is_broken and piece.first_token >= 2 * self.chunk_tokens:
            raise RuntimeError("the device is gone")
        return self.layouts.of(piece)

    def pieces(self, num_blocks: int = 6) -> list[Piece]:
        """Chunks, the first with the sinks."""
        names = [bytes([i]) * NAME_BYTES for i in range(num_blocks // PER_CHUNK)]
        return self.store.keys.chunks(names)

    def packing(self, ids: list[int]) -> list[Packing]:
        return [Packing(x, ids[i : i + PER_CHUNK]) for i, x in self._placed(ids)]

    def fillings(self, blobs: list[bytes], target: list[int]) -> list[Filling]:
        placed = zip(self._placed(target), blobs, strict=True)
        return [Filling(x, blob, 0, target[i : i + PER_CHUNK]) for (i, x), blob in placed]

    def _placed(self, ids: list[int]) -> list[tuple[int, Piece]]:
        return list(zip(range(0, len(ids), PER_CHUNK), self.pieces(len(ids)), strict=True))

    def blobs(self, blocks: Blocks, ids: list[int]) -> list[bytes]:
        return [x.result() for x in blocks.pack(self.packing(ids), blocks.mark())]

    def filled(self, blocks: Blocks, wanted: list[Filling]) -> tuple[set[int], list[torch.Tensor]]:
        """Fill blocks; return which were filled, and the whole cache afterwards, bit for bit."""
        for cache in self.caches.values():
            cache.fill_(EMPTY)
        done = blocks.fill(wanted, blocks.mark())
        return done, [bits(x) for x in self.caches.values()]

    def close(self) -> None:
        self.device.close()
        self.store.close()


def fused(shape: Shape, layer: int) -> torch.Tensor:
    """One layer as vLLM shows it, (blocks, heads, tokens, K | V), in the physical order wanted."""
    token_major = shape.layout == "NHD"
    inner = (shape.block, shape.heads) if token_major else (shape.heads, shape.block)
    generator = torch.Generator().manual_seed(layer)
    loud = torch.exp(torch.randn(2 * shape.dim, generator=generator))
    values = torch.randn(NUM_BLOCKS, *inner, 2 * shape.dim, generator=generator) * loud
    cache = values.to(shape.dtype).to(DEVICE)
    return cache.transpose(1, 2) if token_major else cache


def bits(cache: torch.Tensor) -> torch.Tensor:
    kinds = {2: torch.int16, 4: torch.int32}
    return cache.contiguous().view(kinds[cache.element_size()]).cpu().clone()


def opened(rigs: list[Rig], **changes) -> Rig:
    rigs.append(Rig(Shape(**changes)))
    return rigs[-1]


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
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
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
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


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
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
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
    forged = rig.store.packer.seal_rows(piece, payload.data, codec)
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
    assert transfer.pop_acks() == {1: 1}
    for cache in rig.caches.values():
        cache.fill_(EMPTY)
    staging.expect(7)
    chain = rig.store.maker.of_blocks(hashes, rig.shape.block)
    staging.put(7, StagedBlobs(rig.store.fetch(rig.store.match(ref(), chain)), hashes))
    transfer.load(Load(7, "request", 0, target))
    transfer.wait_for_news(60)
    assert (transfer.pop_loaded(), transfer.pop_bad_blocks()) == ({"request"}, set())
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
