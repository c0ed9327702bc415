"""The Triton kernels of the calibrated fixed rate: the same bytes as the host's codec.

In Triton's interpreter on the host's memory, or on a GPU where there is one. Through the whole
path, from blocks to blobs and back, against the host's pipeline, which has golden digests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the kernels need triton")

from engines.vllm_plugin.blocks.blocks import Filling  # noqa: E402
from engines.vllm_plugin.device.checked_blocks import CheckedBlocks  # noqa: E402
from engines.vllm_plugin.device.device_check import (  # noqa: E402
    kernels_agree,
    proven_blocks,
    scratch_for,
)
from engines.vllm_plugin.device.kernels.triton_rates import (  # noqa: E402
    RatePlaces,
    RateRun,
    TritonRates,
)
from engines.vllm_plugin.device.packed_layout import (  # noqa: E402
    FirstChunkLayout,
    PackedBlockLayout,
)
from engines.vllm_plugin.device.staging_layout import RawStagingLayout  # noqa: E402
from kvstore.blobs.packer import StoreCodecs  # noqa: E402
from kvstore.codecs.base import NUM_SINKS  # noqa: E402
from kvstore.codecs.presets import codec_by_name  # noqa: E402
from kvstore.codecs.rows.sinks import squeezes  # noqa: E402
from kvstore.shapes import Rope  # noqa: E402
from tests.triton.rig import Rig, Shape, are_equal, bits  # noqa: E402
from tests.unit.kvstore.codecs.fixed_rate.integer_models import codec_of, rope_of  # noqa: E402

pytestmark = pytest.mark.triton
USUAL = rope_of(64)


def rated(rope: Rope | None = USUAL, **shape: Any) -> Rig:
    """With a calibrated codec."""
    return Rig(Shape(**shape), lambda layout: codec_of(layout, rope))


SHAPES = {
    "NHD, two layers, two heads": {"heads": 2, "layers": 2},
    "HND": {"layout": "HND", "heads": 2},
    "head_dim 128": {"dim": 128, "rope": rope_of(128)},
    "head_dim 128, half of it turned, fp16": {"dim": 128, "dtype": torch.float16},
    "head_dim 256": {"dim": 256, "rope": rope_of(256)},
    "head_dim 256, fp32": {"dim": 256, "rope": rope_of(256), "dtype": torch.float32},
    "head_dim 32, not turned": {"dim": 32, "rope": None},
    "neighbours are turned": {"rope": Rope(tuple(2.0**-k for k in range(32)), True)},
    "values are turned": {"rope": Rope(USUAL.frequencies, side="values")},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32, "heads": 2},
    "several programs for a chunk": {"block": 24, "per_chunk": 2},
    "an odd number of tokens": {"block": 17, "per_chunk": 1},
    "first tokens apart": {"heads": 4, "layers": 2},
    "first tokens apart, fp32": {"heads": 4, "layers": 2, "dtype": torch.float32},
}


SLOW = ("first tokens apart, fp32",)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(x, id=name, marks=[pytest.mark.thorough] if name in SLOW else [])
        for name, x in SHAPES.items()
    ],
)
def test_the_host_and_the_device_make_and_read_the_same_blobs(shape):
    rig = rated(**shape)
    ids, target = [7, 2, 10, 4, 5, 0], [3, 9, 0, 6, 8, 1]
    first, second = (rig.layouts.of(x) for x in rig.pieces(6)[:2])
    squeezed = squeezes(rig.cache.layout, 0, NUM_SINKS + 1, rig.codec)
    assert isinstance(first, FirstChunkLayout) == squeezed
    assert isinstance(second, PackedBlockLayout)
    expected = rig.blobs(rig.host, ids)
    assert rig.blobs(rig.device, ids) == expected
    found = rig.restored(rig.device, expected, target)
    right = rig.restored(rig.host, expected, target)
    assert are_equal(found, right)


def test_rows_that_cannot_be_packed_are_kept_as_they_are():
    """Infinite, no number, larger than any gain; in K and V, and among the sinks."""
    rig = rated(heads=4, layers=2)
    ids, target = [7, 2, 10, 4], [3, 9, 0, 6]
    odd = [float("inf"), float("nan"), -float("inf"), 1e30, 0.0]
    for i, value in enumerate(odd):
        rig.caches["layer0"][2, 1, i, 5] = value  # keys
        rig.caches["layer1"][10, 0, 7 - i, 64:] = value  # values
        rig.caches["layer1"][7, 0, i + 1, 64:] = value  # sinks, and two rows after them
    before = [bits(x)[ids] for x in rig.caches.values()]
    blobs = rig.blobs(rig.device, ids)
    assert blobs == rig.blobs(rig.host, ids)
    found = rig.restored(rig.device, blobs, target)
    right = rig.restored(rig.host, blobs, target)
    assert are_equal(found, right)
    kept = (1, 1, slice(0, 4), slice(0, 64))
    assert torch.equal(found[0][target][kept], before[0][kept])


def test_rows_of_fp32_that_are_kept_are_rounded_once():
    rig = rated(dtype=torch.float32, heads=4, layers=2)
    rig.caches["layer0"][2, 0, 3, 7] = float("inf")
    rig.caches["layer0"][2, 0, 4, 70] = float("nan")
    blobs = rig.blobs(rig.device, [7, 2])
    assert blobs == rig.blobs(rig.host, [7, 2])
    found, right = (rig.restored(x, blobs, [3, 9]) for x in (rig.device, rig.host))
    assert torch.equal(found[0], right[0])


@pytest.mark.parametrize("cut", [1, -1, 100])
def test_a_payload_of_another_length_fills_nothing(cut):
    rig = rated()
    piece = rig.pieces(4)[1]
    blob = rig.blobs(rig.device, [7, 2, 10, 4])[1]
    payload = bytes(rig.store.packer.open_rows(blob, piece)[1])
    wrong = payload[:-cut] if cut > 0 else payload + b"\0"
    forged = rig.store.packer.blob_of_rows(piece, wrong, rig.codec)
    assert rig.device.fill([Filling(piece, forged, 0, [0, 6])], rig.device.mark()) == set()


def test_what_codes_no_packer_writes_are_restored_as_by_the_host():
    """Random gains and planes: any of them stands for something, on the device as on the host."""
    rig = rated(heads=2)
    ids, target = [7, 2, 10, 4, 5, 11], [3, 9, 0, 6, 8, 1]
    pieces, (plain, *blobs) = rig.pieces(6)[1:], rig.blobs(rig.host, ids)
    packer, chance, forgeries = rig.store.packer, np.random.default_rng(5), [plain]
    for piece, blob in zip(pieces, blobs, strict=True):
        payload = np.frombuffer(packer.open_rows(blob, piece)[1], np.uint8)
        forged = payload.copy()
        forged[4:] = chance.integers(0, 256, len(payload) - 4)
        forgeries.append(packer.blob_of_rows(piece, forged.data, rig.codec))
    found, right = (rig.restored(x, forgeries, target) for x in (rig.device, rig.host))
    assert torch.equal(found[0], right[0])


def test_the_kernels_prove_themselves_on_all_layers(monkeypatch):
    """A calibrated codec knows the layers of its model only."""
    rig = rated(layers=2)
    assert kernels_agree(rig.accelerator, rig.cache, rig.store)
    right = TritonRates.pack

    def wrong(self: TritonRates, run: RateRun, payloads: torch.Tensor, places: RatePlaces) -> None:
        right(self, run, payloads, places)
        payloads[:, places.planes_at + 5] ^= 16

    monkeypatch.setattr(TritonRates, "pack", wrong)
    assert not kernels_agree(rig.accelerator, rig.cache, rig.store)


def test_layers_that_lie_in_one_block_are_tried_in_memory_of_their_size():
    rig = rated(layout="BLHNC", layers=3)
    scratch = scratch_for(rig.codec, rig.cache, 5)
    assert scratch.layout.layers == rig.cache.layout.layers
    views = [side.view for pair in scratch.views for side in pair]
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in views}
    assert sum(memory.values()) == 5 * 8 * rig.cache.layout.bytes_per_token
    real = [side.view for pair in rig.cache.views for side in pair]
    assert [x.stride() for x in views] == [x.stride() for x in real]
    marks = [x.view(torch.int16).fill_(i) for i, x in enumerate(views)]  # none is in another
    assert all(bool((x == i).all()) for i, x in enumerate(marks))
    assert kernels_agree(rig.accelerator, rig.cache, rig.store)


def test_kernels_that_restore_wrong_values_are_found_out(monkeypatch):
    rig = rated()
    monkeypatch.setattr(TritonRates, "unpack", lambda *args: None)
    assert not kernels_agree(rig.accelerator, rig.cache, rig.store)


@pytest.mark.parametrize(("dim", "rope"), [(80, None), (96, rope_of(96))])
def test_dimensions_without_kernels_are_packed_by_the_host(dim, rope):
    rig = rated(dim=dim, rope=rope)
    ids = [7, 2, 10, 4]
    assert isinstance(rig.layouts.of(rig.pieces(4)[1]), RawStagingLayout)
    assert rig.blobs(rig.device, ids) == rig.blobs(rig.host, ids)


def test_an_adopted_codec_leaves_the_layouts_of_the_checked_one():
    """The kernels of the checked codec fill old blobs, also after another codec is adopted."""
    rig = rated()
    piece, blobs, target = rig.pieces(4)[1], rig.blobs(rig.host, [7, 2, 10, 4]), [3, 9, 0, 6]
    right = rig.restored(rig.host, blobs, target)
    rig.store.adopt(StoreCodecs(codec_by_name("tq3")), keep=True)
    assert isinstance(rig.layouts.of(piece), PackedBlockLayout)
    assert torch.equal(rig.restored(rig.device, blobs, target)[0], right[0])


def test_the_kernels_take_over_once_dense3_is_adopted():
    """What a first start does under ``auto``: raw, until the model was measured."""
    rig = rated()
    calibrated = rig.codec
    rig.store.adopt(StoreCodecs(codec_by_name("raw")), keep=True)
    on_device = proven_blocks(rig.accelerator, rig.cache, rig.store)
    prove = partial(proven_blocks, rig.accelerator, rig.cache, rig.store)
    blocks = CheckedBlocks(on_device, rig.host, rig.store, prove)
    rig.store.adopt(StoreCodecs(calibrated), keep=True)
    ids = [7, 2, 10, 4]
    expected = rig.blobs(rig.host, ids)
    assert rig.blobs(blocks, ids) == expected  # by the host, who has the kernels checked
    blocks.close()  # waits for the check
    chunks: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        pack = TritonRates.pack
        patched.setattr(TritonRates, "pack", lambda *args: (chunks.append(1), pack(*args)))
        assert rig.blobs(blocks, ids) == expected
    assert chunks == [1]
