"""States of layers, and rows, between vLLM's tensors and the cold store; no engine runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch lives in vLLM's environment")

import torch

from engines.vllm_plugin.blocks.block_layout import SplitBlock, SplitContent
from engines.vllm_plugin.blocks.paging import PagedCache, paged_cache
from engines.vllm_plugin.blocks.state_layers import (
    RecurrentLayers,
    StateBlocks,
    StatePart,
    WindowLayers,
)
from engines.vllm_plugin.groups import IN_USE, StateGroup
from engines.vllm_plugin.plan import Load
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.session_codec import SessionCodec
from kvstore.codecs.states import matrix_codec
from kvstore.errors import Corrupt
from tests.block_sessions import BLOCK, fetch
from tests.unit.engines.vllm_plugin.worker.rank_rig import CHAIN, Rank

pytestmark = pytest.mark.vllm

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


class StateRank(Rank):
    def __init__(self) -> None:
        self.tensors = recurrent_tensors()
        self.window = window_cache()
        self.open(StateBlocks(GROUPS, [RecurrentLayers(self.tensors), WindowLayers(self.window)]))

    def open(self, states: StateBlocks, **options: Any) -> None:
        kept = states.layout
        options |= {"windows": kept.windows, "window_tokens": kept.window_tokens}
        super().__init__((), states, needs_state=True, **options)

    def load(self, first: int, end: int, state_ids: list[int]) -> tuple[set[str], set[int]]:
        self.stage()
        self.transfer.load(Load(7, "r", first, list(range(1, 1 + end - first)), state_ids))
        return self.ended_load()

    def window_rows(self, block_ids: Sequence[int]) -> list[np.ndarray]:
        return [x for pair in self.window.read(block_ids) for x in pair]


@pytest.fixture
def rank() -> Iterator[StateRank]:
    rank = StateRank()
    yield rank
    rank.close()


def test_a_state_comes_back_into_other_blocks_bit_for_bit(rank):
    rank.save(states={24: [11, 12, 13, 14]})
    state, window = bits(rank.tensors, [11]), rank.window_rows([12, 13, 14])
    assert rank.load(0, 24, [61, 62, 63, 60]) == ({"r"}, set())
    assert bits(rank.tensors, [61]) == state
    assert all(map(np.array_equal, rank.window_rows([62, 63, 60]), window))
    assert rank.pages.holds(CHAIN, 0, list(range(1, 25)))


def test_blocks_in_use_are_not_written(rank):
    rank.save(states={24: [11, 12, 13, 14]})
    before = rank.window_rows(list(range(64)))
    assert rank.load(23, 24, [61, IN_USE, IN_USE, 62]) == ({"r"}, set())
    after = rank.window_rows(list(range(64)))
    changed = [
        i for i in range(64) if any(not np.array_equal(*x) for x in by_block(before, after, i))
    ]
    assert changed == [62]


def by_block(before, after, i: int):
    part = slice(i * BLOCK, (i + 1) * BLOCK)
    return [(a[:, part], b[:, part]) for a, b in zip(before, after, strict=True)]


def test_a_state_without_a_block_to_go_to_fails(rank):
    rank.save(states={24: [11, 12, 13, 14]})
    assert rank.load(0, 24, [61, 0, 63, 60]) == ({"r"}, {61, 0, 63, 60})


def test_the_state_of_another_shape_is_refused_and_dropped(rank):
    rank.save(states={24: [11, 12, 13, 14]})
    rank.tensors[1].resize_(64, 6)  # in place: the engine has this very tensor
    assert rank.load(0, 24, [61, 62, 63, 60])[0] == {"r"}
    assert fetch(rank.store, CHAIN).blobs == []


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


class PackedRank(StateRank):
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
        self.open(states, codecs=StoreCodecs(codec.kv, codec))

    def conv(self, block: int) -> bytes:
        return self.tensors[0][block, : CONV.nbytes].numpy().tobytes()

    def matrix(self, block: int) -> np.ndarray:
        return RecurrentLayers(self.tensors, [CONV, MATRIX]).read([block])[1].array


CONV = StatePart(torch.bfloat16, (3, 5))
MATRIX = StatePart(torch.float32, (2, 8, 16))
PAGE = CONV.nbytes + MATRIX.nbytes + 40  # with some room at the end


def test_a_packed_state_is_near_and_its_convolution_exact():
    rank = PackedRank()
    rank.save(states={24: [11, 12, 13, 14]})
    conv, matrix, window = rank.conv(11), rank.matrix(11), rank.window_rows([12, 13, 14])
    padding = rank.tensors[0][61, CONV.nbytes + MATRIX.nbytes :].clone()
    assert rank.load(0, 24, [61, 62, 63, 60]) == ({"r"}, set())
    assert rank.conv(61) == conv
    errors = np.abs(rank.matrix(61) - matrix)
    assert 0 < errors.max() <= np.abs(matrix).max() / 127
    for a, b in zip(rank.window_rows([62, 63, 60]), window, strict=True):
        assert 0 < np.abs(a - b).mean() < 0.15
    assert torch.equal(rank.tensors[0][61, CONV.nbytes + MATRIX.nbytes :], padding)
    rank.close()


def test_a_recurrent_state_alone_comes_back():
    """Without windows, whose blocks say how many tokens a block has."""
    rank = StateRank()
    rank.close()
    rank.open(StateBlocks(GROUPS[:1], [RecurrentLayers(rank.tensors)]))
    rank.save(states={24: [11]})
    state = bits(rank.tensors, [11])
    assert rank.load(0, 24, [61]) == ({"r"}, set())
    assert bits(rank.tensors, [61]) == state
    rank.close()


# ---- rows into blocks and back, in every arrangement

NUM_BLOCKS, HEADS, TOKENS, DIM = 16, 3, 32, 8
ORDER = torch.randperm(TOKENS * DIM, generator=torch.Generator().manual_seed(1))
ARRANGEMENTS = [SplitContent(), SplitBlock(), SplitBlock(ORDER), SplitBlock(ORDER, ORDER.flip(0))]


def cache_of(arrangement, dtype) -> PagedCache:
    shape = (NUM_BLOCKS, HEADS, TOKENS, 2 * DIM)
    return paged_cache({f"layer{i}": torch.zeros(shape, dtype=dtype) for i in "ab"}, arrangement)


def filled(cache: PagedCache, num_blocks: int):
    run = cache.layout.empty(num_blocks * TOKENS)
    for i, array in enumerate(x for pair in run for x in pair):
        values = torch.arange(array.size).reshape(array.shape).add(i).remainder(251)
        bits = values.to(cache.dtype).view(torch.int16 if array.itemsize == 2 else torch.int32)
        array[...] = bits.numpy().view(array.dtype)
    return run


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=["content", "block", "keys", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_read(arrangement, dtype):
    cache = cache_of(arrangement, dtype)
    run = filled(cache, 5)
    cache.write([9, 2, 14], run, 1)  # its second block to its fourth
    back = cache.read([9, 2, 14])
    for wanted, found in zip(run, back, strict=True):
        for a, b in zip(wanted, found, strict=True):
            assert np.array_equal(a[:, TOKENS : 4 * TOKENS], b)
    untouched = cache.read([x for x in range(NUM_BLOCKS) if x not in (9, 2, 14)])
    assert not any(array.any() for pair in untouched for array in pair)
