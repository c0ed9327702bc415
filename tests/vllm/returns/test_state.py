"""The state of layers that do not keep all tokens, between tensors and the cold store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch lives in vLLM's environment")

import torch

from engines.vllm_plugin.blocks.block_layout import SplitContent
from engines.vllm_plugin.blocks.host_blocks import HostBlocks
from engines.vllm_plugin.blocks.paging import paged_cache
from engines.vllm_plugin.blocks.state_layers import (
    RecurrentLayers,
    StateBlocks,
    StatePart,
    WindowLayers,
)
from engines.vllm_plugin.blocks.stateful_blocks import StatefulBlocks
from engines.vllm_plugin.groups import IN_USE, StateGroup
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.worker.rank import StagingArea
from engines.vllm_plugin.worker.transfer import Transfer
from kvstore.blobs.codec_set import CodecSet
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.session_codec import SessionCodec
from kvstore.codecs.states import matrix_codec
from kvstore.errors import Corrupt
from tests.block_sessions import BLOCK, hashes, open_store, ref
from tests.unit.engines.vllm_plugin.worker.numpy_blocks import NoStream, NumpyBlocks
from tests.unit.engines.vllm_plugin.worker.test_transfer import ended_loads

pytestmark = pytest.mark.vllm

CHAIN = hashes(list(range(100)))  # 25 blocks
IDS = list(range(30, 55))
GROUPS = (
    StateGroup(0, ("r",), 1, recurrent=True),
    StateGroup(2, ("w",), 3, recurrent=False),
)


def recurrent_tensors() -> list:
    """A layer's, as vLLM gives them: of two dtypes, blocks further apart than they are long."""
    room = torch.randn(64, 80)
    return [room[:, :12].unflatten(1, (3, 4)), torch.randn(64, 5, dtype=torch.bfloat16)]


def window_cache():
    return paged_cache({"w": torch.randn(64, 2, BLOCK, 128)}, SplitContent())


def bits(tensors, block_ids: Sequence[int]) -> list[bytes]:
    return [x[list(block_ids)].contiguous().view(torch.uint8).numpy().tobytes() for x in tensors]


class Rank:
    def __init__(self) -> None:
        self.tensors = recurrent_tensors()
        self.window = window_cache()
        self.store = open_store(has_state=True)
        self.staging = StagingArea()
        self.pages = NumpyBlocks()
        self.pages.compute(CHAIN, IDS)
        layers = [RecurrentLayers(self.tensors), WindowLayers(self.window)]
        rest = HostBlocks(self.pages, self.store, NoStream())
        states = StateBlocks(GROUPS, layers)
        blocks = StatefulBlocks(rest, states, self.store, NoStream())
        self.transfer = Transfer(blocks, self.store, self.staging, 1 << 30)

    def save(self, states: dict[int, list[int]]) -> None:
        save = Save(1, ref(), CHAIN, IDS, states)
        self.transfer.save(save, lambda *_: None)
        assert self.transfer.wait_saved(ref(), 20)

    def load(self, first: int, end: int, state_ids: list[int]) -> tuple[set[str], set[int]]:
        self.staging.expect(7)
        self.staging.put(7, self.store.fetch(ref(), CHAIN, first))
        self.transfer.load(Load(7, "r", first, list(range(1, 1 + end - first)), state_ids))
        loaded = ended_loads(self.transfer)
        return self.transfer.take_failed(loaded), self.transfer.take_bad_blocks()

    def window_rows(self, block_ids: Sequence[int]) -> list[np.ndarray]:
        return [x for pair in self.window.read(block_ids) for x in pair]


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.transfer.close()
    rank.store.close()


def test_a_state_comes_back_into_other_blocks_bit_for_bit(rank):
    rank.save({24: [11, 12, 13, 14]})
    state, window = bits(rank.tensors, [11]), rank.window_rows([12, 13, 14])
    assert rank.load(0, 24, [61, 62, 63, 60]) == (set(), set())
    assert bits(rank.tensors, [61]) == state
    assert all(map(np.array_equal, rank.window_rows([62, 63, 60]), window))
    assert rank.pages.holds(CHAIN, 0, list(range(1, 25)))


def test_blocks_in_use_are_not_written(rank):
    rank.save({24: [11, 12, 13, 14]})
    before = rank.window_rows(list(range(64)))
    assert rank.load(23, 24, [61, IN_USE, IN_USE, 62]) == (set(), set())
    after = rank.window_rows(list(range(64)))
    changed = [
        i for i in range(64) if any(not np.array_equal(*x) for x in by_block(before, after, i))
    ]
    assert changed == [62]


def by_block(before, after, i: int):
    part = slice(i * BLOCK, (i + 1) * BLOCK)
    return [(a[:, part], b[:, part]) for a, b in zip(before, after, strict=True)]


def test_a_load_that_ends_elsewhere_than_the_state_fails(rank):
    """It happens when another rank has less: no more is offered than every rank has."""
    rank.save({24: [11, 12, 13, 14]})
    failed, bad = rank.load(0, 20, [61, 62, 63, 60])
    assert failed == {"r"}
    assert bad == {61, 62, 63, 60}


def test_a_state_without_a_block_to_go_to_fails(rank):
    rank.save({24: [11, 12, 13, 14]})
    assert rank.load(0, 24, [61, 0, 63, 60])[0] == {"r"}


def test_a_failure_is_reported_with_its_load_only(rank):
    rank.save({24: [11, 12, 13, 14]})
    rank.transfer.load(Load(9, "other", 0, [1], []))  # nothing is staged for it
    loaded = ended_loads(rank.transfer)
    assert rank.transfer.take_failed(set()) == set()
    assert rank.transfer.take_failed(loaded) == {"other"}
    assert rank.transfer.take_failed({"other"}) == set()


def test_the_state_of_another_shape_is_refused_and_dropped(rank):
    rank.save({24: [11, 12, 13, 14]})
    rank.tensors[1].resize_(64, 6)  # in place: the engine has this very tensor
    assert rank.load(0, 24, [61, 62, 63, 60])[0] == {"r"}
    assert rank.store.fetch(ref(), CHAIN, 0).spans == []


@pytest.mark.parametrize("cut", [0, 1])
def test_arrays_that_do_not_fit_are_refused_before_anything_is_written(cut):
    layers = RecurrentLayers(recurrent_tensors())
    arrays = layers.read([1])
    before = layers.read(list(range(64)))
    arrays[cut] = replace(arrays[cut], array=arrays[cut].array[..., :-1])
    with pytest.raises(Corrupt):
        layers.write([5], arrays)
    after = layers.read(list(range(64)))
    assert all(np.array_equal(a.array, b.array) for a, b in zip(before, after, strict=True))


class PackedRank(Rank):
    """A rank whose states are packed: matrices in 8 bits, windows in 4."""

    def __init__(self, tensors: list | None = None, window=None) -> None:
        self.tensors = tensors or [torch.randint(0, 255, (64, PAGE), dtype=torch.uint8)]
        if tensors is None:
            numbers = torch.randn(64, *MATRIX.shape)
            self.tensors[0][:, CONV.nbytes : CONV.nbytes + MATRIX.nbytes] = numbers.flatten(1).view(
                torch.uint8
            )
        self.window = window or window_cache()
        layers = [RecurrentLayers(self.tensors, [CONV, MATRIX]), WindowLayers(self.window)]
        states = StateBlocks(GROUPS, layers)
        layout = states.layout
        assert layout.has_matrices and layout.window_tokens == 3 * BLOCK
        size = states.kv_size(itemsize=2)
        assert size.windows == ((2 * self.window.layout.elements_per_token, 3 * BLOCK),)
        assert size.fixed == CONV.nbytes + MATRIX.nbytes
        codec = SessionCodec(codec_by_name("raw"), codec_by_name("tq4"), matrix_codec("state8"))
        codecs = CodecSet(*[codec.kv] * 3, sessions={codec.kv.id: codec})
        self.store = open_store(has_state=True, codecs=codecs, windows=layout.windows)
        self.staging = StagingArea()
        self.pages = NumpyBlocks()
        self.pages.compute(CHAIN, IDS)
        rest = HostBlocks(self.pages, self.store, NoStream())
        blocks = StatefulBlocks(rest, states, self.store, NoStream())
        self.transfer = Transfer(blocks, self.store, self.staging, 1 << 30)

    def conv(self, block: int) -> bytes:
        return self.tensors[0][block, : CONV.nbytes].numpy().tobytes()

    def matrix(self, block: int) -> np.ndarray:
        return RecurrentLayers(self.tensors, [CONV, MATRIX]).read([block])[1].array

    def close(self) -> None:
        self.transfer.close()
        self.store.close()


CONV = StatePart(torch.bfloat16, (3, 5))
MATRIX = StatePart(torch.float32, (2, 8, 16))
PAGE = CONV.nbytes + MATRIX.nbytes + 40  # with some room at the end


def test_a_packed_state_is_near_and_its_convolution_exact():
    rank = PackedRank()
    rank.save({24: [11, 12, 13, 14]})
    conv, matrix, window = rank.conv(11), rank.matrix(11), rank.window_rows([12, 13, 14])
    padding = rank.tensors[0][61, CONV.nbytes + MATRIX.nbytes :].clone()
    assert rank.load(0, 24, [61, 62, 63, 60]) == (set(), set())
    assert rank.conv(61) == conv
    errors = np.abs(rank.matrix(61) - matrix)
    assert 0 < errors.max() <= np.abs(matrix).max() / 127
    for a, b in zip(rank.window_rows([62, 63, 60]), window, strict=True):
        assert 0 < np.abs(a - b).mean() < 0.15
    assert torch.equal(rank.tensors[0][61, CONV.nbytes + MATRIX.nbytes :], padding)
    rank.close()


def test_a_state_that_came_back_with_loss_is_not_packed_again():
    first = PackedRank()
    first.save({24: [11, 12, 13, 14]})
    first.load(0, 24, [61, 62, 63, 60])
    matrix, window = first.matrix(61), first.window_rows([62, 63, 60])
    first.store.discard(first.store.keys.state(CHAIN, 24).key)  # all that there was of it
    first.save({24: [61, 62, 63, 60]})
    assert first.load(0, 24, [51, 52, 53, 50]) == (set(), set())
    assert np.array_equal(first.matrix(51), matrix)
    for a, b in zip(first.window_rows([52, 53, 50]), window, strict=True):
        assert np.abs(a - b).max() < 0.03  # rounded to 16 bits, never through the codec
    first.close()


def test_a_later_state_takes_over_the_windows_rows_that_came_back():
    rank = PackedRank()
    rank.save({24: [11, 12, 13, 14]})
    rank.load(0, 24, [61, 62, 63, 60])
    before = rank.store.older.windows(rank.store.keys.state(CHAIN, 24))
    # One block further: the newest of its window's blocks is new, the others came back.
    rank.save({25: [15, 63, 60, 16]})
    after = rank.store.older.windows(rank.store.keys.state(CHAIN, 25))
    assert before and after[0] == before[0]
    rank.close()


def test_a_state_of_before_its_parts_were_known_is_taken():
    tensors = [torch.randint(0, 255, (64, PAGE), dtype=torch.uint8)]
    whole = RecurrentLayers(tensors).read([7])
    layers = RecurrentLayers(tensors, [CONV, MATRIX])
    layers.write([9], whole)
    assert torch.equal(tensors[0][9], tensors[0][7])
    with pytest.raises(Corrupt):
        layers.write([9], [*whole, *whole])
