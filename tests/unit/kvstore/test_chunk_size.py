"""How many tokens one blob holds."""

from __future__ import annotations

import pytest

from kvstore.chunk_size import chunk_tokens
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
@pytest.mark.parametrize("codec", ["auto", "raw", "tq3", "tq4", "dense3"])
def test_a_chunk_has_the_tokens_asked_for_in_whole_blocks(codec, set_to, block, tokens):
    config = StoreConfig(codec=codec, chunk_tokens=set_to)
    assert chunk_tokens(config, block) == tokens


@pytest.mark.parametrize("codec", ["balanced", "max", "other.codecs:Own"])
def test_bytes_that_tokens_of_a_chunk_share_are_spread_over_more_of_them(codec):
    assert chunk_tokens(StoreConfig(codec=codec), 32) == 128
    assert chunk_tokens(StoreConfig(codec="tq3", disk_codec=codec), 32) == 128
    assert chunk_tokens(StoreConfig(codec="tq3", redis_codec=codec), 32) == 128


@pytest.mark.parametrize("tokens", [1, 15])
def test_tiny_chunks_are_refused(tokens):
    with pytest.raises(ValueError, match="16"):
        StoreConfig(chunk_tokens=tokens)
