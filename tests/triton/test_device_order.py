"""The order of work on a device: nothing before its mark, nothing given back before it is done.

On a device that does nothing before it is waited for; a GPU cannot be made to be late.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the kernels need triton")

from engines.vllm_plugin.device.device_check import blocks_on  # noqa: E402
from kvstore.blobs.packer import StoreCodecs  # noqa: E402
from kvstore.codecs.presets import codec_by_name  # noqa: E402
from tests.lazy_device import LazyDevice  # noqa: E402
from tests.triton.rig import EMPTY, Rig, bits  # noqa: E402
from tests.triton.test_device_blocks import coded  # noqa: E402

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is late or not, as it likes"),
]
IDS, TARGET = [7, 2, 10, 4, 5, 0], [3, 9, 0, 6, 8, 1]


@pytest.fixture(params=["raw", "tq3"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = coded(request.param, layers=1)
    yield rig
    rig.close()


def model_of(rig: Rig) -> LazyDevice:
    assert isinstance(rig.accelerator, LazyDevice)
    return rig.accelerator


def test_a_save_reads_what_the_model_has_yet_to_compute(rig):
    (cache,) = rig.caches.values()
    right = rig.blobs(rig.host, IDS)
    computed = cache.clone()
    cache.fill_(EMPTY)
    model_of(rig).model.ask(partial(cache.copy_, computed))
    assert rig.blobs(rig.device, IDS) == right


def test_a_save_gives_blocks_back_once_they_are_read(rig):
    (cache,) = rig.caches.values()
    right = rig.blobs(rig.host, IDS)
    packing = rig.device.pack(rig.packing(IDS), rig.device.mark())
    cache.fill_(EMPTY)  # the next user of these blocks
    assert [x.result() for x in packing] == right


def test_a_load_comes_after_what_the_model_has_yet_to_do_with_its_blocks(rig):
    blobs = rig.blobs(rig.host, IDS)
    (right,) = rig.filled(rig.host, rig.fillings(blobs, TARGET))[1]
    (cache,) = rig.caches.values()
    model_of(rig).model.ask(partial(cache.fill_, EMPTY))  # as vLLM empties new blocks
    assert rig.device.fill(rig.fillings(blobs, TARGET), rig.device.mark()) == set(TARGET)
    model_of(rig).model.drain()
    assert torch.equal(bits(cache), right)


def test_a_save_that_fails_leaves_nothing_that_would_read_blocks_later(rig):
    """vLLM gives the blocks to others as soon as the save has ended, well or badly."""
    rig.is_broken = True
    with pytest.raises(RuntimeError, match="gone"):
        rig.device.pack(rig.packing(IDS), rig.device.mark())
    with pytest.raises(RuntimeError, match="gone"):
        rig.device.fill(rig.fillings([b""] * 3, TARGET), rig.device.mark())
    assert [x.num_put_off for x in model_of(rig).streams] == [0] * len(model_of(rig).streams)


def test_what_the_host_does_beside_the_kernels_is_in_the_same_order(rig):
    """Blobs of an earlier codec do not go through the kernels, nor does one that is adopted."""
    (cache,) = rig.caches.values()
    earlier = rig.blobs(rig.host, IDS)
    rig.store.adopt(StoreCodecs(codec_by_name("tq4")))
    blocks = blocks_on(model_of(rig), rig.cache, rig.store)
    wanted = rig.fillings([*earlier[:2], rig.blobs(rig.host, IDS)[2]], TARGET)
    (right,) = rig.filled(rig.host, wanted)[1]
    model_of(rig).model.ask(partial(cache.fill_, EMPTY))
    assert blocks.fill(wanted, blocks.mark()) == set(TARGET)
    model_of(rig).model.drain()
    assert torch.equal(bits(cache), right)
    rig.store.adopt(StoreCodecs(codec_by_name("lm3")))  # which has no kernels
    expected = rig.blobs(rig.host, TARGET)
    computed = cache.clone()
    cache.fill_(EMPTY)
    model_of(rig).model.ask(partial(cache.copy_, computed))
    assert rig.blobs(blocks, TARGET) == expected
    blocks.close()
