"""Short sessions reach most of their preset's ratio, everything counted in bytes."""

from __future__ import annotations

import pytest

from benchmarks.density import SHARES, SMOLLM2, measure, synthetic_run
from kvstore.codecs.presets import codec_by_name, open_codec
from kvstore.session import CHUNK_TOKENS
from kvstore.shapes import slice_tokens
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_profile, model_run


@pytest.mark.parametrize("num_tokens", [300, 1000, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_short_session_reaches_its_share_in_ram_and_on_disk(num_tokens: int) -> None:
    run = synthetic_run(SMOLLM2, num_tokens)
    row = measure("sample", SMOLLM2, codec_by_name("tq3"), run)[-1]
    assert row.num_tokens == num_tokens
    in_ram, on_disk = row.shares
    assert in_ram >= SHARES[num_tokens]
    assert on_disk >= SHARES[num_tokens] - 0.01  # of each chunk's last page half is empty


@pytest.mark.parametrize("preset", ["tq3", "dense3", "balanced", "max", "safe"])
def test_small_chunks_are_as_dense_as_large_ones(preset: str) -> None:
    """But for the states that an entropy coder begins with, 80 bytes for each of three stacks."""
    layout, codec = model_layout(), open_codec(preset, model_profile())
    run = model_run(layout, 4 * CHUNK_TOKENS, seed=5)

    def nbytes(first: int, end: int) -> int:
        return len(codec.encode(slice_tokens(run, first, end), layout, 64 + first))

    ends = range(CHUNK_TOKENS, 4 * CHUNK_TOKENS + 1, CHUNK_TOKENS)
    small = [nbytes(end - CHUNK_TOKENS, end) for end in ends]
    begin = {"tq3": 0, "dense3": 40}.get(preset, 400)
    assert sum(small) <= 4 * begin + 1.05 * nbytes(0, 4 * CHUNK_TOKENS)
