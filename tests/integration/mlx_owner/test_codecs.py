"""Lossy codecs under the real owner: rows from a packed copy are never packed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.mlx_worker.sessions.hot_sessions import HotSession
from kvstore.blobs.chain import CHUNK, RECORD, TAIL
from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.format import codec_in
from kvstore.codecs.presets import codec_by_name
from kvstore.session import SessionRef
from tests.integration.mlx_owner.harness import Answer, Engine, engine, session, text

pytestmark = pytest.mark.mlx

NEW = [5, 6, 7, 8]


def hot(it: Engine, ref: SessionRef) -> HotSession:
    found = it.owner.parts.hot_cache.sessions.get((ref.tenant, ref.id))
    assert found is not None
    return found


def codecs_in(it: Engine, tier: int, kind: bytes = CHUNK) -> list[str]:
    return sorted(codec_in(x).decode() for _, x in it.tiers[tier].scan(kind))


def evict_all(it: Engine) -> None:
    for tier in it.tiers:
        tier.delete_many([x for x, _ in tier.scan(b"") if x[:1] != RECORD])


def cached(answer: Answer) -> str:
    assert answer.cache is not None and not answer.failed
    return answer.cache.header()


async def asleep(it: Engine, ref: SessionRef, prompt: list[int]) -> list[int]:
    """A first turn, then sleep; returns the start of the next prompt."""
    answer = await it.turn(prompt, ref)
    await it.settled()
    await it.demote_all()
    return prompt + answer.tokens


async def test_a_woken_session_whose_copies_are_gone_is_kept_as_rows(tmp_path: Path) -> None:
    one = session("one")
    async with engine("llama", tmp_path, codec="tq4") as it:
        history = await asleep(it, one, text(1, 300))
        second = await it.turn(history + NEW, one)
        await it.settled()
        assert cached(second) == "cold-ram; tokens=308" and hot(it, one).lossy_tokens == 308
        evict_all(it)
        longer = history + NEW + second.tokens + NEW
        third = await it.turn(longer, one)  # hot all the while
        await it.settled()
        assert cached(third).startswith("hot")
        # What was computed since is packed: the next tail's rows.
        assert codecs_in(it, 0) == codecs_in(it, 1) == ["restored16.1"] * 2
        assert codecs_in(it, 0, TAIL) == codecs_in(it, 1, TAIL) == ["segments.1"]
        await it.demote_all()
        again = await it.turn(longer + third.tokens + NEW, one)
        await it.settled()
        assert hot(it, one).lossy_tokens == len(longer + third.tokens)
    assert cached(again).startswith("cold-ram")


@pytest.mark.parametrize("prefetched", [False, True])
async def test_an_edit_in_the_middle_of_a_restored_chunk(tmp_path: Path, prefetched: bool) -> None:
    one = session("one")
    async with engine("llama", tmp_path, codec="tq4") as it:
        history = await asleep(it, one, text(1, 300))
        if prefetched:
            assert (await it.verbs.prefetch(one)).report is not None
            assert hot(it, one).lossy_tokens == 308
        edited = history[:200] + text(2, 150)
        answer = await it.turn(edited, one)
        await it.settled()
        assert cached(answer).split(";")[1] == " tokens=200"
        assert hot(it, one).lossy_tokens == 200
        assert codecs_in(it, 0).count("segments.1") == 1  # the chunk of tokens 128 .. 256
        assert it.store.stats().counters["chunks_kept"] == 1
        borrower = await it.turn(edited[:180] + text(3, 40), session("two"))
        await it.settled()
        assert cached(borrower).startswith("hot")
        assert hot(it, session("two")).lossy_tokens == 180


async def test_computed_sessions_are_packed(tmp_path: Path) -> None:
    one = session("one")
    async with engine("llama", tmp_path, codec="tq4") as it:
        history = await asleep(it, one, text(1, 300))
        evict_all(it)
        answer = await it.turn(history + NEW, one)
        await it.settled()
        assert cached(answer).startswith("miss") and hot(it, one).lossy_tokens == 0
        assert codecs_in(it, 0) == ["tq4.2"] * 2


async def test_the_disk_has_a_codec_of_its_own(tmp_path: Path) -> None:
    one = session("one")
    async with engine("llama", tmp_path, codec="tq4", disk_codec="tq3") as it:
        history = await asleep(it, one, text(1, 300))
        assert codecs_in(it, 0) == ["tq4.2"] * 2
        assert codecs_in(it, 1) == ["tq3.2"] * 2
    async with engine("llama", tmp_path, codec="tq4", disk_codec="tq3") as it:
        answer = await it.turn(history + NEW, one)
        await it.settled()
        assert cached(answer) == "cold-disk; tokens=308"
        assert codecs_in(it, 0) == ["tq3.2"] * 2


async def test_another_codec_is_adopted_between_two_turns(tmp_path: Path) -> None:
    one = session("one")
    async with engine("llama", tmp_path) as it:
        history = await asleep(it, one, text(1, 300))
        it.store.adopt(CodecSet.one(codec_by_name("tq4")))
        answer = await it.turn(history + text(4, 150), one)
        await it.settled()
        assert cached(answer) == "cold-ram; tokens=308" and hot(it, one).lossy_tokens == 0
        assert codecs_in(it, 0) == ["raw.1"] * 2 + ["tq4.2"]
        await it.demote_all()
        await it.turn(history + text(4, 150) + answer.tokens + NEW, one)
        await it.settled()
        assert hot(it, one).lossy_tokens == len(history) + 150 + len(answer.tokens)
