"""Sessions that go cold and come back: with codec raw, as if they had never slept."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.http import CacheOutcome
from engines.mlx_worker import control
from engines.mlx_worker.cache import kv_arrays
from kvstore.session import TIERS, SessionRef
from tests.integration.mlx_owner.harness import (
    Answer,
    Engine,
    begun,
    engine,
    session,
    surround,
    text,
    whole,
)
from tests.integration.tiny_models import KINDS, UNTRIMMABLE

pytestmark = pytest.mark.mlx

NEW = [5, 6, 7, 8]  # the user's new tokens in the next turn


def same(one: Answer, other: Answer) -> None:
    """Tokens equal, and their probabilities as close as float32 sums in another order are."""
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def cache(answer: Answer) -> CacheOutcome:
    assert answer.cache is not None and not answer.failed
    return answer.cache


@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_that_slept_answers_as_one_that_did_not(kind: str, tmp_path: Path):
    """Three turns; before the third one copy sleeps."""
    awake, sleeper = session("awake"), session("sleeper", "other")
    async with engine(kind, tmp_path) as it:
        history = text(1, 300)
        for _ in range(2):
            answers = [await it.turn(history, x) for x in (awake, sleeper)]
            same(*answers)
            history = history + answers[0].tokens + NEW
        await it.settled()
        assert (await it.verbs.demote(sleeper, None)).kept is None
        report = await it.verbs.report(sleeper)
        assert not report.hot and report.tier == "ram"
        kept, woken = await it.turn(history, awake), await it.turn(history, sleeper)
    assert cache(kept).source == "hot" and cache(woken).source == "cold-ram"
    assert cache(kept).cached_tokens == len(history) - len(NEW)
    assert cache(woken).cached_tokens == whole(len(history) - len(NEW))
    assert cache(woken).reason is None
    same(kept, woken)


@pytest.mark.parametrize("kind", KINDS)
async def test_four_uneven_sessions_sleep_and_wake_in_one_batch(kind: str, tmp_path: Path):
    prompts = [text(i, n) for i, n in enumerate((24, 200, 65, 128))]
    refs = [session(f"s{i}") for i in range(4)]
    async with engine(kind, tmp_path) as it:
        first = await together(it, prompts, refs)
        longer = [x + y.tokens + NEW for x, y in zip(prompts, first, strict=True)]
        never_slept = await together(it, longer, [session(f"s{i}") for i in range(4)])
        assert {cache(x).source for x in never_slept} == {"hot"}
    async with engine(kind, tmp_path / "again") as it:
        await together(it, prompts, refs)
        await it.settled()
        await it.demote_all()
        woken = await together(it, longer, refs)
    for one, other in zip(never_slept, woken, strict=True):
        assert cache(other).source == "cold-ram"
        assert cache(other).cached_tokens == whole(cache(one).cached_tokens)
        same(one, other)


async def together(
    it: Engine, prompts: Sequence[list[int]], refs: Sequence[SessionRef]
) -> list[Answer]:
    pairs = zip(prompts, refs, strict=True)
    return await asyncio.gather(*(it.turn(prompt, ref) for prompt, ref in pairs))


@pytest.mark.parametrize("kind", UNTRIMMABLE)
async def test_a_state_at_a_boundary_saves_what_an_edited_turn_still_shares(kind, tmp_path):
    chat, one = text(1, 190), session("one")
    async with engine(kind, tmp_path) as it:
        await it.turn(chat + text(2, 10), one, boundaries=[140, 190])
        await it.settled()
        edited = await it.turn(chat + text(3, 60), one, boundaries=[140, 245])
        fresh = await it.turn(chat + text(3, 60))
        await it.settled()
        again = await it.turn(chat + text(3, 60), one)
    assert cache(again).header() == "cold-ram; tokens=224"  # of 250, the last full chunk
    same(again, fresh)
    assert cache(edited).header() == "cold-ram; tokens=160; reason=diverged"
    same(edited, fresh)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
async def test_a_system_prompt_that_sessions_share_is_computed_twice_at_most(kind, tmp_path):
    """The second session to begin so shows that it is shared, and leaves the state to others."""
    system, names = text(1, 140), ("one", "two", "three")
    turns = []
    async with engine(kind, tmp_path) as it:
        for i, name in enumerate(names):
            prompt = system + text(2 + i, 110)
            turns.append(await it.turn(prompt, session(name), boundaries=[140, 240]))
            await it.settled()
        fresh = await it.turn(system + text(4, 110))
    assert [cache(x).cached_tokens for x in turns] == [0, 0, 128]
    same(turns[2], fresh)


async def test_an_edited_turn_takes_the_longer_of_hot_and_cold(tmp_path: Path):
    """The hot copy holds, after an edit, the new branch; the old one is still found by content."""
    one, old, new = session("one"), text(1, 600), text(1, 100) + text(2, 100)
    async with engine("llama", tmp_path) as it:
        expected = await it.turn(old, one)
        await it.settled()
        edited = await it.turn(new, one)
        await it.settled()
        back = await it.turn(old, one)
    assert cache(edited).header() == "hot; tokens=100; reason=diverged"
    assert (cache(back).source, cache(back).cached_tokens) == ("cold-ram", 576)
    same(back, expected)


async def test_a_short_own_copy_wins_against_a_shorter_hot_beginning(tmp_path: Path, monkeypatch):
    """Unless it adds so little that computing it takes less than restoring all of it."""
    beginning, headers = text(1, 52), list[str]()
    async with engine("llama", tmp_path) as it:
        for name, share in (("a", 0.4), ("b", 0.5)):  # the second machine restores slowly
            monkeypatch.setitem(TIERS, "ram", TIERS["ram"]._replace(restore_share=share))
            own = beginning + text(ord(name), 48)
            first = await it.asleep_after(own, session(name), max_tokens=2)
            await it.turn(beginning + text(9, 60), session(f"hot-{name}"), max_tokens=2)
            await it.settled()
            back = await it.turn(own + first.tokens + NEW, session(name))
            same(back, await it.turn(own + first.tokens + NEW))
            headers.append(cache(back).header())
        await it.settled()
    assert headers == ["cold-ram; tokens=96", "hot; tokens=52; reason=computed-sooner"]


async def test_turns_of_one_session_at_the_same_time_are_all_right(tmp_path: Path):
    one = session("one")
    async with engine("llama", tmp_path) as it:
        first = await it.turn(text(1, 300), one)
        base = text(1, 300) + first.tokens
        tails = [[20 + i, 30 + i, 40 + i] for i in range(4)]
        expected = [await it.turn(base + x) for x in tails]
        got = await asyncio.gather(*(it.turn(base + x, one) for x in tails))
        later = await it.turn(base + tails[3] + got[3].tokens + NEW, one)
    for one_answer, other in zip(got, expected, strict=True):
        same(one_answer, other)
    assert cache(later).cached_tokens >= len(base)


async def test_demoting_gives_the_memory_back(tmp_path: Path):
    one = session("one")
    async with engine("llama", tmp_path) as it:
        gc.collect()  # leftovers of earlier engines
        empty = it.reports.engine()
        await it.turn(text(1, 2000), one)
        await it.settled()
        hot = it.reports.engine()
        assert (await it.verbs.demote(one, None)).kept is None
        cold = it.reports.engine()
    nbytes = 2000 * 3072  # three layers, two heads of 64, K and V, float32
    assert hot.idle_hot_bytes >= nbytes and cold.idle_hot_bytes == 0
    assert hot.active_bytes - cold.active_bytes >= nbytes
    assert cold.active_bytes - empty.active_bytes < nbytes // 20


async def test_what_cannot_be_demoted_says_why(tmp_path: Path):
    one = session("one")
    async with engine("llama", tmp_path) as it:
        assert await it.verbs.report(one) is None
        assert (await it.verbs.demote(one, None)).report is None
        stream = it.submit(text(1, 200), one, max_tokens=4000)
        reading = await begun(stream)
        assert (await it.verbs.demote(one, None)).kept == "busy"
        stream.cancel()
        await reading
        await it.verbs.pin(one, True)
        pinned = await it.verbs.demote(one, None)
        assert pinned.kept == "pinned" and pinned.report is not None and pinned.report.hot
        await it.verbs.pin(one, False)
        assert (await it.verbs.demote(one, "disk")).kept is None
        report = await it.verbs.report(one)
    assert report.tier == "disk" and not report.hot
    async with engine("llama") as it:
        await it.turn(text(1, 200), one)
        assert (await it.verbs.demote(one, None)).kept == "disabled"


async def test_a_demote_does_not_wait_for_a_long_save(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "SAVE_WAIT_S", 0.05)
    one, ends = session("one"), list[Callable[[], None]]()
    async with engine("llama", tmp_path) as it:
        store = it.store

        def save(*given: Any, **more: Any) -> bool:
            ends.append(lambda: store.save(*given, **more))
            return True

        surround(it, save=save)
        await it.turn(text(1, 200), one)
        while not ends:  # the turn's end has reached the owner thread
            await asyncio.sleep(0.01)
        done = await it.verbs.demote(one, None)
        assert done.kept == "saving" and done.report is not None and done.report.hot
        ends.pop()()
        await it.settled()
        assert (await it.verbs.demote(one, None)).kept is None


@pytest.mark.parametrize("prefetched", [True, False])
async def test_a_pinned_session_stays_hot_after_a_restart_too(prefetched: bool, tmp_path: Path):
    one = session("one")
    async with engine("llama", tmp_path) as it:
        first = await it.turn(text(1, 200), one)
        await it.settled()
        await it.verbs.pin(one, True)
    async with engine("llama", tmp_path) as it:
        if prefetched:
            await it.verbs.prefetch(one)
        else:
            await it.turn(text(1, 200) + first.tokens + NEW, one)
        done = await it.verbs.demote(one, None)
        assert done.kept == "pinned" and done.report is not None and done.report.hot
        await it.verbs.pin(one, False)
        await it.settled()
        assert (await it.verbs.demote(one, None)).kept is None


async def test_prefetch_makes_a_session_hot_before_its_turn(tmp_path: Path):
    one = session("one")
    async with engine("llama", tmp_path) as it:
        first = await it.asleep_after(text(1, 300), one)
        done = await it.verbs.prefetch(one)
        assert done.report.hot and done.report.tokens == 288
        second = await it.asleep_after(text(1, 300) + first.tokens + NEW, one)
        # A turn that comes during the prefetch joins it.
        waking = asyncio.create_task(it.verbs.prefetch(one))
        await asyncio.sleep(0)
        longer = text(1, 300) + first.tokens + NEW + second.tokens + NEW
        third = await it.turn(longer, one)
        await waking
        assert (await it.verbs.prefetch(session("unknown"))).report is None
    assert cache(second).header() == "hot; tokens=288"
    assert cache(third).cached_tokens == whole(len(longer) - len(NEW))


async def test_a_forgotten_session_is_nowhere(tmp_path: Path):
    one = session("one")
    async with engine("llama", tmp_path) as it:
        await it.turn(text(1, 300), one)
        await it.settled()
        assert (await it.verbs.forget(one)).report is None
        assert it.reports.sessions() == []
        again = await it.turn(text(1, 300), one)
        stream = it.submit(text(2, 200), session("two"), max_tokens=4000)
        reading = await begun(stream)
        busy = await it.verbs.forget(session("two"))
        assert busy.report.busy
        stream.cancel()
        await reading
        await it.settled()
        assert [x.id for x in it.reports.sessions()] == ["one"]
    assert cache(again).header() == "miss; tokens=0; reason=never-stored"


async def test_a_damaged_chunk_costs_a_prefill_and_nothing_else(tmp_path: Path):
    """The second of three chunks is damaged: the tokens before it are still good."""
    one = session("one")
    async with engine("llama", tmp_path) as it:
        first = await it.turn(text(1, 400), one)
        longer = text(1, 400) + first.tokens + NEW
        expected = await it.turn(longer)
        row = await it.owner.call(lambda: keys_of(it, one, 130))
        await it.settled()
        await it.verbs.demote(one, "disk")
    assert sum(overwrite(x, row) for x in (tmp_path / "cold").rglob("*") if x.is_file()) == 1
    async with engine("llama", tmp_path) as it:
        second = await it.turn(longer, one)
        corrupt = it.reports.engine().counters["corrupt"]
    assert cache(second).header() == "cold-disk; tokens=128; reason=corrupt"
    assert corrupt == 1
    same(second, expected)


def keys_of(it: Engine, ref: SessionRef, position: int) -> bytes:
    """The first layer's first key at ``position``, as codec raw stores it."""
    hot = it.owner.batching.hot_cache.sessions.get((ref.tenant, ref.id))
    keys, _ = kv_arrays.growing_run(hot.caches, position + 1)[0]
    return keys[0, position].tobytes()


def overwrite(file: Path, wanted: bytes) -> int:
    """Zeroes in the place of these bytes; how often they were there."""
    content = file.read_bytes()
    if found := content.count(wanted):
        file.write_bytes(content.replace(wanted, bytes(len(wanted))))
    return found


async def test_a_store_that_cannot_be_read_costs_a_prefill_and_nothing_else(tmp_path: Path):
    one = session("one")
    async with engine("llama", tmp_path) as it:
        first = await it.asleep_after(text(1, 300), one)
        it.store.close()
        second = await it.turn(text(1, 300) + first.tokens + NEW, one)
        fresh = await it.turn(text(1, 300) + first.tokens + NEW)
    assert cache(second).source == "miss"
    same(second, fresh)


async def test_a_view_that_waits_for_the_codec_never_sees_the_next_turn(tmp_path: Path):
    """The next turn writes after the tokens that are being saved, and after an edit over them."""
    one = session("one")
    async with engine("llama", tmp_path) as it:
        for i in range(4):
            await it.turn(text(1, 128) + text(i, 130), one)
        await it.settled()
        await it.demote_all()
        last = await it.turn(text(1, 128) + text(3, 130) + NEW, one)
        fresh = await it.turn(text(1, 128) + text(3, 130) + NEW)
    assert cache(last).source == "cold-ram" and cache(last).cached_tokens == 256
    same(last, fresh)
