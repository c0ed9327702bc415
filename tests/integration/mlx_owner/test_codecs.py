"""Lossy codecs under the real owner: rows from a packed copy are never packed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.mlx_worker.sessions.cold_sessions import HotSession
from kvstore.blobs.chain import CHUNK, RECORD
from kvstore.blobs.format import codec_in
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.presets import codec_by_name
from kvstore.session import SessionRef
from tests.integration.mlx_owner.harness import Answer, Engine, engine, session, text

pytestmark = pytest.mark.mlx

NEW = [5, 6, 7, 8]


def hot(it: Engine, ref: SessionRef) -> HotSession:
    found = it.owner.batching.hot_cache.sessions.get((ref.tenant, ref.id))
    assert found is not None
    return found


def codecs_in(it: Engine, tier: int) -> list[str]:
    return sorted(codec_in(x).decode() for _, x in it.tiers[tier].scan(CHUNK))


def evict_all(it: Engine) -> None:
    for tier in it.tiers:
        tier.delete_many([x for x, _ in tier.scan(b"") if x[:1] != RECORD])


def cached(answer: Answer) -> str:
    assert answer.cache is not None and not answer.failed
    return answer.cache.header()


async def asleep(it: Engine, ref: SessionRef, prompt: list[int]) -> list[int]:
    """A first turn, then sleep; returns the start of the next prompt."""
    answer = await it.asleep_after(prompt, ref)
    return prompt + answer.tokens


async def test_a_woken_session_whose_copies_are_gone_is_not_saved_again(tmp_path: Path) -> None:
    one = session("one")
    async with engine("llama", tmp_path, codec="tq4") as it:
        history = await asleep(it, one, text(1, 300))
        second = await it.turn(history + NEW, one)
        await it.settled()
        assert cached(second) == "cold-ram; tokens=288" and hot(it, one).restored_tokens == 288
        evict_all(it)
        longer = history + NEW + second.tokens + NEW
        third = await it.turn(longer, one)  # hot all the while
        await it.settled()
        assert cached(third).startswith("hot")
        assert codecs_in(it, 0) == codecs_in(it, 1) == []
        assert it.store.stats().counters["chunks_left_out"] == 10
        # What was computed anew is packed again, from exact rows.
        await it.verbs.forget(one)
        again = await it.turn(longer + third.tokens + NEW, one)
        await it.settled()
        assert hot(it, one).restored_tokens == 0 and codecs_in(it, 0) == ["tq4.2"] * 10
    assert cached(again).startswith("miss")


@pytest.mark.parametrize("wakes_by", ["turn", "prefetch"])
async def test_an_edit_in_the_middle_of_a_restored_chunk(tmp_path, wakes_by) -> None:
    """The chunk with the edit is computed as a whole, so that it and what follows can be saved."""
    one = session("one")
    async with engine("llama", tmp_path, codec="tq4") as it:
        history = await asleep(it, one, text(1, 300))
        await (it.turn(history + NEW, one) if wakes_by == "turn" else it.verbs.prefetch(one))
        await it.settled()
        assert hot(it, one).restored_tokens == 288
        edited = history[:200] + text(2, 150)
        answer = await it.turn(edited, one)
        await it.settled()
        assert cached(answer) == "hot; tokens=192; reason=diverged"
        assert hot(it, one).restored_tokens == 192
        record = it.store.record(one)
        assert record is not None and record.num_tokens == 352
        borrower = await it.turn(edited[:180] + text(3, 40), session("two"))
        await it.settled()
        assert cached(borrower) == "hot; tokens=160"
        assert hot(it, session("two")).restored_tokens == 160


async def test_another_codec_is_adopted_between_two_turns(tmp_path: Path) -> None:
    one = session("one")
    async with engine("llama", tmp_path) as it:
        history = await asleep(it, one, text(1, 300))
        it.store.adopt(StoreCodecs(codec_by_name("tq4")))
        answer = await it.turn(history + text(4, 150), one)
        await it.settled()
        assert cached(answer) == "cold-ram; tokens=288" and hot(it, one).restored_tokens == 0
        assert set(codecs_in(it, 0)) == set(codecs_in(it, 1)) == {"raw.1", "tq4.2"}
        await it.demote_all()
        longer = history + text(4, 150) + answer.tokens
        await it.turn(longer + NEW, one)
        await it.settled()
        assert hot(it, one).restored_tokens == len(longer) // 32 * 32


async def test_a_session_shorter_than_a_chunk_says_why_it_is_not_stored(tmp_path: Path) -> None:
    one = session("one")
    async with engine("llama", tmp_path) as it:
        first = await it.turn(text(1, 12), one)
        await it.settled()
        assert it.store.record(one) is None
        hot_one = hot(it, one)
        await it.owner.call(lambda: it.owner.batching.hot_cache.drop(hot_one))
        back = await it.turn(text(1, 12) + first.tokens + text(2, 30), one)
    assert cached(back) == "miss; tokens=0; reason=too-short"
