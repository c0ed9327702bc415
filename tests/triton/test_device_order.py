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
from engines.vllm_plugin.worker.transfer import Filling, Packing  # noqa: E402
from kvstore.blobs.segments import Lineage  # noqa: E402
from kvstore.store.records import Span  # noqa: E402
from tests.lazy_device import LazyDevice  # noqa: E402
from tests.triton.test_device_blocks import EMPTY, Rig, Shape, bits  # noqa: E402

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is late or not, as it likes"),
]
IDS, TARGET = [7, 2, 10, 4, 5], [3, 9, 0, 6, 8]


@pytest.fixture(params=["raw", "tq3"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(Shape(codec=request.param, layers=1))
    yield rig
    rig.close()


def model_of(rig: Rig) -> LazyDevice:
    assert isinstance(rig.accelerator, LazyDevice)
    return rig.accelerator


def fillings(rig: Rig, blobs: list[bytes]) -> list[Filling]:
    return [
        Filling(x, blob, 0, TARGET[x.first_block : x.end_block])
        for x, blob in zip(rig.spans(), blobs, strict=True)
    ]


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
    (right,) = rig.filled(rig.host, fillings(rig, blobs))[1]
    (cache,) = rig.caches.values()
    model_of(rig).model.ask(partial(cache.fill_, EMPTY))  # as vLLM empties new blocks
    assert rig.device.fill(fillings(rig, blobs), rig.device.mark()) == set(TARGET)
    model_of(rig).model.drain()
    assert torch.equal(bits(cache), right)


def test_a_save_that_fails_leaves_nothing_that_would_read_blocks_later(rig):
    """vLLM gives the blocks to others as soon as the save has ended, well or badly."""
    rig.is_broken = True
    with pytest.raises(RuntimeError, match="gone"):
        rig.device.pack(rig.packing(IDS), rig.device.mark())
    with pytest.raises(RuntimeError, match="gone"):
        rig.device.fill(fillings(rig, [b""] * 3), rig.device.mark())
    assert [x.num_put_off for x in model_of(rig).streams] == [0] * len(model_of(rig).streams)


def test_what_the_host_does_beside_the_kernels_is_in_the_same_order(rig):
    """Parts of blocks, and rows from a lossy copy, do not go through the kernels."""
    (cache,) = rig.caches.values()
    blocks = blocks_on(model_of(rig), rig.cache, rig.store)
    spans = rig.spans()
    part = Span(b"p" + spans[0].key[1:], len(IDS) * rig.shape.block, 3, rig.shape.block)
    wanted = [
        Packing(spans[0], IDS[:2], Lineage(2 * rig.shape.block)),
        Packing(spans[1], IDS[2:4]),
        Packing(part, [11]),
    ]
    right = [x.result() for x in rig.host.pack(wanted, None)]
    computed = cache.clone()
    cache.fill_(EMPTY)
    model_of(rig).model.ask(partial(cache.copy_, computed))
    assert [x.result() for x in blocks.pack(wanted, blocks.mark())] == right
    cache.fill_(EMPTY)
    back = [Filling(spans[1], right[1], 0, [3, 9]), Filling(part, right[2], 0, [1], 3)]
    assert blocks.fill(back, blocks.mark()) == {3, 9, 1}
    error = (cache[1, :, :3].float() - computed[11, :, :3].float()).square().mean()
    share = float(error / computed[11, :, :3].float().square().mean())
    assert share == 0 if rig.store.packer.codec.exact else 0 < share < 0.06
    assert bool((cache[1, :, 3:] == EMPTY).all())
    blocks.close()
