"""The ring: regions never overlap, come back in any order, and wait for room."""

from __future__ import annotations

import random
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the kernels need triton")

from engines.vllm_plugin.device.accelerator import STEP, Region, StagingRing  # noqa: E402
from tests.lazy_device import device_here  # noqa: E402

pytestmark = pytest.mark.triton


def ring(num_steps: int) -> StagingRing:
    return StagingRing(num_steps * STEP, device_here())


def test_regions_of_any_size_in_any_order_never_overlap():
    staging, held = ring(20), []
    chance = random.Random(1)
    for number in range(2000):
        region = staging.take(chance.randrange(1, 6 * STEP), wait=not held)
        if region is None:
            taken, mark = held.pop(chance.randrange(len(held)))
            assert bool((taken.host == mark).all())
            staging.give_back(taken)
            continue
        region.host.fill_(number % 251)
        held.append((region, number % 251))
    assert all(bool((x.host == mark).all()) for x, mark in held)


def test_what_fits_the_whole_ring_is_given_once_it_is_empty():
    staging = ring(4)
    small = staging.take(1, wait=False)
    assert small is not None
    assert staging.take(4 * STEP, wait=False) is None
    staging.give_back(small)
    assert staging.take(4 * STEP, wait=False) is not None


def test_who_waits_is_woken_when_enough_has_come_back():
    staging = ring(2)
    first, second = (staging.take(STEP, wait=False) for _ in "ab")
    got: list[Region | None] = []
    thread = threading.Thread(
        target=lambda: got.append(staging.take(2 * STEP, wait=True)), daemon=True
    )
    thread.start()
    staging.give_back(second)
    thread.join(0.2)  # time enough to take what it must not
    assert got == []
    staging.give_back(first)
    thread.join(10)
    assert len(got) == 1
    assert got[0].host.numel() == 2 * STEP


def test_an_upload_reaches_the_twin_and_a_download_the_host():
    region = ring(1).take(100, wait=False)
    region.host.fill_(7)
    assert not bool((region.device == 7).any())
    region.upload()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert bool((region.device == 7).all())
    region.device.fill_(8)
    region.download()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert bool((region.host == 8).all())


def test_a_region_in_parts_is_free_once_all_users_have_returned_it():
    staging = ring(4)
    region = staging.take(STEP - 6, 3, num_users=2, wait=False)
    assert region.host.shape == region.device.shape == (3, STEP)
    assert [x.shape for x in region.arrays(STEP - 6)] == [(STEP - 6,)] * 3
    staging.give_back(region)
    assert staging.take(2 * STEP, wait=False) is None
    staging.give_back(region)
    assert staging.take(4 * STEP, wait=False) is not None
