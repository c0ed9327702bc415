"""How many tokens one blob holds."""

from __future__ import annotations

import pytest

from kvstore.chunk_size import chunk_tokens
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.seeds import SEEDS
from kvstore.codecs.stack_codec import StackCodec
from kvstore.config import StoreConfig


@pytest.mark.parametrize(
    ("set_to", "block", "tokens"),
    [
        (0, 0, 128),
        (0, 16, 32),
        (0, 32, 32),
        (0, 784, 784),
        (64, 0, 64),
        (64, 16, 64),
        (64, 48, 48),
        (16, 32, 32),
    ],
)
@pytest.mark.parametrize("codec", ["raw", "tq3", "tq4"])
def test_a_chunk_is_what_was_asked_for_in_whole_blocks(codec, set_to, block, tokens):
    config = StoreConfig(chunk_tokens=set_to)
    assert chunk_tokens(config, [codec_by_name(codec)], block) == tokens


def test_what_tokens_of_a_chunk_share_is_spread_over_more_of_them():
    stacks = [x for x in map(codec_by_name, SEEDS) if isinstance(x, StackCodec)]
    assert stacks
    assert {chunk_tokens(StoreConfig(), [x], 32) for x in stacks} == {128}
    assert chunk_tokens(StoreConfig(), [codec_by_name("tq3"), stacks[0]], 32) == 128


@pytest.mark.parametrize("tokens", [1, 15])
def test_tiny_chunks_are_refused(tokens):
    with pytest.raises(ValueError, match="16"):
        StoreConfig(chunk_tokens=tokens)
