"""Windows and recurrent states that sleep packed: sizes, tokens, and nothing packed twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.blobs.chain import SNAPSHOT
from kvstore.blobs.format import codec_in
from kvstore.blobs.packer import PACKED_STATE
from tests.integration.mlx_owner.harness import Engine, engine, session, text

pytestmark = pytest.mark.mlx

# Of each kind of model: a codec, and how many times smaller its states are at least. They are tiny,
# and tokens after the last chunk lie in them exactly.
PACKED = [
    ("gemma3_text", "tq4", 3.0),
    ("qwen3_next", "tq4+state8", 1.9),
    ("mamba2", "raw+state8", 1.9),
    ("mamba2", "raw+state4", 2.9),
]


def snapshots(it: Engine) -> dict[bytes, bytes]:
    """The states in the fastest tier, by name."""
    return {name: bytes(blob) for name, blob in it.tiers[0].scan(SNAPSHOT)}


@pytest.mark.parametrize("kind, codec, times", PACKED)
async def test_states_sleep_smaller_and_come_back(
    kind: str, codec: str, times: float, tmp_path: Path
):
    prompt, sizes = text(1, 200), {}
    for name in ("raw", codec):
        async with engine(kind, tmp_path / name.replace("+", "-"), codec=name) as it:
            first = await it.turn(prompt, session("one"))
            await it.settled()
            blobs = snapshots(it)
            sizes[name] = sum(map(len, blobs.values()))
            packed = {codec_in(x).endswith(PACKED_STATE) for x in blobs.values()}
            assert packed == {name != "raw"}
            await it.demote_all()
            longer = [*prompt, *first.tokens, 5, 6, 7]
            woken = await it.turn(longer, session("one"))
            assert woken.cache.header().startswith("cold-ram")
            fresh = await it.turn(longer)
            moved = np.abs(np.array(woken.logprobs[:1]) - np.array(fresh.logprobs[:1]))
            assert (moved < (1e-3 if name == "raw" else 0.5)).all()
    assert sizes["raw"] > times * sizes[codec]


async def test_a_session_that_was_saved_exactly_is_still_read(tmp_path: Path):
    prompt = text(1, 200)
    async with engine("gemma3_text", tmp_path, codec="raw") as it:
        first = await it.turn(prompt, session("one"))
        await it.settled()
        await it.demote_all()
    async with engine("gemma3_text", tmp_path, codec="raw", disk_codec="tq4") as it:
        again = await it.turn([*prompt, *first.tokens, 9], session("one"))
        assert again.cache.header().startswith("cold-disk")


@pytest.mark.parametrize("kind, codec", [("gemma3_text", "tq4"), ("mamba2", "raw+state8")])
async def test_a_hundred_sleeps_leave_the_bytes_of_the_first(kind: str, codec: str, tmp_path: Path):
    prompt = text(1, 200)
    async with engine(kind, tmp_path, codec=codec) as it:
        await it.turn(prompt, session("one"), max_tokens=1)
        await it.settled()
        before = snapshots(it)
        for _ in range(5):
            await it.demote_all()
            # It comes back, and nothing is added.
            await it.verbs.prefetch(session("one"))
            await it.settled()
        assert snapshots(it) == before


async def test_rows_of_a_window_are_packed_once(tmp_path: Path):
    """A turn of a few tokens after a sleep: packed rows keep their bytes in the next state."""
    prompt = text(1, 200)
    async with engine("gemma3_text", tmp_path, codec="tq4") as it:
        first = await it.turn(prompt, session("one"), max_tokens=4)
        await it.settled()
        before = _segments(it)
        await it.demote_all()
        longer = [*prompt, *first.tokens, 5, 6]
        again = await it.turn(longer, session("one"), max_tokens=4)
        assert again.cache.header().startswith("cold-ram")
        await it.settled()
        after = _segments(it)
        newest = max(after)
        assert newest > max(before)
        kept = set(after[newest]) & set(before[max(before)])
        assert kept  # the window is 32 tokens, of which the turn replaced six


def _segments(it: Engine) -> dict[int, list[bytes]]:
    """The packed segments of every state, by its position."""
    record = it.store.record(session("one"))
    assert record is not None
    chain, packer = it.store.keys.chain(record), it.store.packer
    found = {}
    for position in record.snapshots:
        span = it.store.keys.state(chain, position)
        blob = it.store.ledger.stack.get(0, [span.key])[0]
        assert blob is not None
        segments = packer.segments_of(blob, span.key, span.first_token, span.num_tokens)
        found[position] = [x.payload.tobytes() for x in segments]
    return found
