"""Chooses between a device's kernels and the host, by what the kernels were checked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from engines.vllm_plugin.blocks.blocks import Filling, Packing
from engines.vllm_plugin.blocks.host_blocks import HostBlocks
from engines.vllm_plugin.device.checked_blocks import (
    MOST_TRIES,
    CheckedBlocks,
    KernelsUnusable,
)
from kvstore.blobs.format import codec_in
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.presets import codec_by_name
from tests.block_sessions import (
    BLOCK,
    LAYOUT,
    PER_CHUNK,
    chain_of,
    hashes,
    open_store,
    ram_and_disk,
    tokens_of,
)
from tests.unit.engines.vllm_plugin.worker.numpy_blocks import NoStream, NumpyBlocks

CHAIN = hashes(tokens_of(24))  # twelve chunks
IDS = list(range(30, 54))
ELSEWHERE = list(range(1, 25))
TQ3, TQ4 = codec_by_name("tq3"), codec_by_name("tq4")


class Device:
    """Stands in for the device's kernels: has the host pack, and notes the requests."""

    def __init__(self, host: HostBlocks) -> None:
        self._host = host
        self.packed: list[bytes] = []
        self.filled: list[bytes] = []

    def mark(self) -> object:
        return None

    def pack(self, wanted: Sequence[Packing], ready: object) -> list[Future[bytes]]:
        self.packed += [x.piece.key for x in wanted]
        return self._host.pack(wanted, ready)

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        self.filled += [x.piece.key for x in wanted]
        return self._host.fill(wanted, ready)

    def close(self) -> None:
        """Nothing is held."""


def no_kernels() -> Device:
    raise KernelsUnusable("they are wrong")


class Rig:
    """A store that packs with ``tq3``, and blocks with the KV of a session."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(ram_and_disk(folder), codec="tq3")
        pages = NumpyBlocks()
        pages.compute(CHAIN, IDS)
        self.host = HostBlocks(pages, self.store, NoStream())
        pieces = self.store.keys.chunks(chain_of(self.store, CHAIN))
        firsts = range(0, len(IDS), PER_CHUNK)
        self.chunks = [
            Packing(x, IDS[i : i + PER_CHUNK]) for i, x in zip(firsts, pieces, strict=True)
        ]
        self._checked: list[CheckedBlocks] = []

    def checked(self, device: Device, prove: Callable[[], Device]) -> CheckedBlocks:
        self._checked.append(CheckedBlocks(device, self.host, self.store, prove))
        return self._checked[-1]

    def close(self) -> None:
        for blocks in self._checked:
            blocks.close()
        self.store.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    opened = Rig(tmp_path)
    yield opened
    opened.close()


def packs_by(device: Callable[[], Device | None], blocks: CheckedBlocks, wanted: Packing) -> bytes:
    """Pack until the device does; returns the last blob."""
    deadline = time.monotonic() + 20
    blob = b""
    while not ((found := device()) and found.packed) and time.monotonic() < deadline:
        blob = bytes(blocks.pack([wanted], None)[0].result())
    assert found.packed == [wanted.piece.key]
    return blob


class Proof:
    """Returns a device's half once the test lets it end; None: its kernels are wrong."""

    def __init__(self, *found: Device | None) -> None:
        self._found = list(found)  # of each call; the last one of all others
        self.asked = threading.Semaphore(0)
        self.may_end = threading.Event()

    def __call__(self) -> Device:
        self.asked.release()
        assert self.may_end.wait(20)
        found = self._found.pop(0) if len(self._found) > 1 else self._found[0]
        return found or no_kernels()


def test_kernels_are_checked_again_for_a_codec_that_is_adopted(rig):
    old, new = Device(rig.host), Device(rig.host)
    proof = Proof(new)
    blocks = rig.checked(old, proof)
    assert blocks.block_bytes == BLOCK * LAYOUT.bytes_per_token
    wanted = rig.chunks
    (before,) = (x.result() for x in blocks.pack(wanted[:1], None))
    assert codec_in(before) == b"tq3.2" and old.packed == [wanted[0].piece.key]
    filling = Filling(wanted[0].piece, before, 0, ELSEWHERE[:PER_CHUNK])
    assert blocks.fill([filling], None) == set(ELSEWHERE[:PER_CHUNK])
    assert old.filled == [wanted[0].piece.key]
    rig.store.adopt(StoreCodecs(TQ4))
    old.packed.clear()
    old.filled.clear()
    for x in wanted[:3]:  # the host packs, and the check is asked for once
        assert codec_in(blocks.pack([x], None)[0].result()) == b"tq4.2"
    assert proof.asked.acquire(timeout=20) and not proof.asked.acquire(blocking=False)
    assert old.packed == new.packed == []
    proof.may_end.set()
    after = packs_by(lambda: new, blocks, wanted[0])
    assert codec_in(after) == b"tq4.2"
    assert blocks.why_host == ""
    fillings = [Filling(wanted[0].piece, x, 0, ELSEWHERE[:2]) for x in (before, after)]
    assert blocks.fill(fillings, None) == set(ELSEWHERE[:2])
    assert (old.filled, new.filled) == ([], [wanted[0].piece.key])  # the host reads the older blob


def test_kernels_that_are_wrong_for_an_adopted_codec_are_checked_once(rig):
    device, proof = Device(rig.host), Proof(None)
    blocks = rig.checked(device, proof)
    wanted = rig.chunks[:1]
    rig.store.adopt(StoreCodecs(TQ4))
    proof.may_end.set()
    blocks.pack(wanted, None)
    assert proof.asked.acquire(timeout=20)
    for _ in range(3):
        assert codec_in(blocks.pack(wanted, None)[0].result()) == b"tq4.2"
    assert device.packed == [] and not proof.asked.acquire(timeout=0.1)
    assert blocks.why_host == "they are wrong"
    rig.store.adopt(StoreCodecs(TQ3))  # the one that they are right for
    blocks.pack(wanted, None)
    assert device.packed == [wanted[0].piece.key]


def test_a_codec_that_is_adopted_many_times_is_packed_by_the_device_each_time(rig):
    made: list[Device] = []

    def proves() -> Device:
        made.append(Device(rig.host))
        return made[-1]

    blocks = rig.checked(Device(rig.host), proves)
    wanted = rig.chunks[:1]
    for codec in (TQ4, TQ3) * (MOST_TRIES + 1):
        rig.store.adopt(StoreCodecs(codec))
        made.clear()
        packs_by(lambda: made[-1] if made else None, blocks, wanted[0])
        assert blocks.why_host == ""


def test_a_check_counts_for_no_codec_if_another_is_adopted_meanwhile(rig):
    new = Device(rig.host)
    proof = Proof(None, new)
    blocks = rig.checked(Device(rig.host), proof)
    wanted = rig.chunks[:1]
    rig.store.adopt(StoreCodecs(TQ4))
    blocks.pack(wanted, None)
    assert proof.asked.acquire(timeout=20)
    rig.store.adopt(StoreCodecs(TQ3))
    rig.store.adopt(StoreCodecs(TQ4))
    proof.may_end.set()
    packs_by(lambda: new, blocks, wanted[0])


def test_a_check_that_failed_is_made_again_but_not_for_ever(rig):
    asked: list[str] = []

    def fails() -> Device:
        asked.append("check")
        raise MemoryError("the device is full")

    blocks = rig.checked(Device(rig.host), fails)
    wanted = rig.chunks[:1]
    rig.store.adopt(StoreCodecs(TQ4))
    deadline = time.monotonic() + 20
    while len(asked) < MOST_TRIES and time.monotonic() < deadline:
        assert codec_in(blocks.pack(wanted, None)[0].result()) == b"tq4.2"
    for _ in range(3):
        blocks.pack(wanted, None)
    blocks.close()  # waits for a check that is still to come
    assert len(asked) == MOST_TRIES and blocks.why_host == "the device is full"
