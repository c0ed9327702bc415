"""Windows and recurrent states that sleep packed: sizes, tokens, and nothing packed twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.blobs.chain import STATE, WINDOW
from kvstore.blobs.format import codec_in
from kvstore.blobs.packer import PACKED_STATE
from tests.integration.mlx_owner.harness import Engine, engine, session, text

pytestmark = pytest.mark.mlx

# Of each kind of model: a codec, and how many times smaller its states are at least.
PACKED = [
    ("gemma3_text", "tq4", 3.0),
    ("qwen3_next", "tq4+state8", 1.9),
    ("mamba2", "raw+state8", 1.9),
    ("mamba2", "raw+state4", 2.9),
]


def states(it: Engine) -> dict[bytes, bytes]:
    """The states in the fastest tier and the rows of their windows, by name."""
    found = [x for kind in (STATE, WINDOW) for x in it.tiers[0].scan(kind)]
    return {name: bytes(blob) for name, blob in found}


@pytest.mark.parametrize("kind, codec, times", PACKED)
async def test_states_sleep_smaller_and_come_back(kind, codec, times, tmp_path):
    prompt, sizes = text(1, 200), {}
    for name in ("raw", codec):
        async with engine(kind, tmp_path / name.replace("+", "-"), codec=name) as it:
            first = await it.turn(prompt, session("one"))
            await it.settled()
            blobs = states(it)
            sizes[name] = sum(map(len, blobs.values()))
            if "+" in codec:
                of_states = [x for key, x in blobs.items() if key[:1] == STATE]
                assert {codec_in(x) == PACKED_STATE for x in of_states} == {name != "raw"}
            await it.demote_all()
            longer = [*prompt, *first.tokens, 5, 6, 7]
            woken = await it.turn(longer, session("one"))
            assert woken.cache.header() == "cold-ram; tokens=192"
            fresh = await it.turn(longer)
            moved = np.abs(np.array(woken.logprobs[:1]) - np.array(fresh.logprobs[:1]))
            assert (moved < (1e-3 if name == "raw" else 0.5)).all()
    assert sizes["raw"] > times * sizes[codec]


@pytest.mark.parametrize("kind, codec", [("gemma3_text", "tq4"), ("mamba2", "raw+state8")])
async def test_sleeps_without_turns_leave_the_bytes_of_the_first(kind, codec, tmp_path):
    async with engine(kind, tmp_path, codec=codec) as it:
        await it.turn(text(1, 200), session("one"), max_tokens=1)
        await it.settled()
        before = states(it)
        for _ in range(5):
            await it.demote_all()
            # It comes back, and nothing is added.
            await it.verbs.prefetch(session("one"))
            await it.settled()
        assert states(it) == before


async def test_rows_of_a_window_are_packed_once_and_shared_by_states(tmp_path: Path):
    """A turn after a sleep: the window's older chunk keeps its bytes, the newer one is added."""
    prompt = text(1, 216)
    async with engine("gemma3_text", tmp_path, codec="tq4") as it:
        first = await it.turn(prompt, session("one"), max_tokens=4)
        await it.settled()
        before = states(it)
        await it.demote_all()
        longer = [*prompt, *first.tokens, *text(2, 40)]
        again = await it.turn(longer, session("one"), max_tokens=4)
        assert again.cache.header() == "cold-ram; tokens=192"
        await it.settled()
        after = states(it)
        kept = {x for x in before if x[:1] == WINDOW} & after.keys()
        assert all(after[x] == before[x] for x in kept)
        record = it.store.record(session("one"))
        assert record is not None and record.states == (6, 8)


async def test_the_state_is_kept_at_the_last_chunk_end_of_an_answer(tmp_path: Path):
    """An answer of many chunks: a return resumes after the last full one of them."""
    prompt = text(1, 60)
    for kind in ("gemma3_text", "qwen3_next", "mamba2"):
        async with engine(kind, tmp_path / kind) as it:
            first = await it.asleep_after(prompt, session("one"), max_tokens=40)
            longer = [*prompt, *first.tokens, 5, 6, 7]
            woken = await it.turn(longer, session("one"))
            fresh = await it.turn(longer)
        assert woken.cache.header() == "cold-ram; tokens=96"
        assert woken.tokens == fresh.tokens
