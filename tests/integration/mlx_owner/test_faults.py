"""What fails, or comes at a bad moment, around turns, prefetches, deletes and pins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.mlx_worker.batch.request import Sequence
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import Caches
from kvstore.ledger.notices import StoreNotice
from kvstore.ledger.record import SessionRecord
from kvstore.session import SessionRef
from kvstore.shapes import KVRun
from kvstore.store.restorer import Match, Restored
from tests.integration.mlx_owner.harness import (
    engine,
    hold_restores,
    session,
    surround,
    text,
    whole,
)

pytestmark = pytest.mark.mlx

NEW = [5, 6, 7, 8]
A, B = session("a"), session("b")


async def test_a_prefetch_pairs_kv_with_its_own_tokens_though_a_save_comes_in_between(tmp_path):
    async with engine("llama", tmp_path) as it:
        store, history = it.store, text(1, 200)
        first = await it.turn(history, A, max_tokens=4)
        await it.settled()
        old = store.record(A)
        history = history + first.tokens + NEW + text(9, 40)
        second = await it.turn(history, A, max_tokens=4)
        await it.settled()
        longest = history + second.tokens + NEW
        expected = await it.turn(longest)
        await it.demote_all()
        answers = [old]

        def record(ref: SessionRef) -> SessionRecord | None:
            return answers.pop() if answers else store.record(ref)

        surround(it, record=record)
        await it.verbs.prefetch(A)
        hot = it.owner.batching.hot_cache.sessions.get((A.tenant, A.id))
        assert hot.caches[0].offset == hot.num_tokens == whole(len(history) + 4)
        third = await it.turn(longest, A)
    assert third.cache.source == "hot"
    assert third.tokens == expected.tokens


async def test_a_save_that_fails_fails_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async with engine("llama", tmp_path) as it:
        store = it.store

        def save(ref: SessionRef, *arguments: Any, **more: Any) -> bool:
            if ref == A:
                raise RuntimeError("no save today")
            return store.save(ref, *arguments, **more)

        surround(it, save=save)
        bystander = asyncio.create_task(it.turn(text(2, 40), B, max_tokens=200))
        # Two that end in the very same step.
        turns = await asyncio.gather(
            it.turn(text(1, 40), A, max_tokens=4), it.turn(text(3, 40), session("c"), max_tokens=4)
        )
        other = await bystander
        assert [x.finished for x in (*turns, other)] == [{0: "length"}] * 3
        assert not any(x.failed for x in (*turns, other))
        kept = (await it.verbs.demote(A, None)).kept
        assert kept == "no-cold-copy"  # not "busy": the turn is over
        assert it.reports.engine().counters["keep_failures"] == 2  # after the turn, and to demote
        await it.settled()  # the others' saves take as long as they take
        assert not it.owner.batching.hot_cache.is_saving
        surround(it, save=store.save)
        assert (await it.verbs.demote(A, None)).kept is None
    assert "could not be saved" in caplog.text


async def test_kv_that_cannot_be_kept_fails_no_request(tmp_path, monkeypatch, caplog):
    compact, calls = kv_arrays.compact, []

    def fails_once(caches: Caches) -> None:
        calls.append(caches)
        if len(calls) == 1:
            raise MemoryError("no room")
        compact(caches)

    async with engine("llama", tmp_path) as it:
        monkeypatch.setattr(kv_arrays, "compact", fails_once)
        bystander = asyncio.create_task(it.turn(text(2, 40), B, max_tokens=100))
        lost = await it.turn(text(1, 40), A, max_tokens=4)
        other = await bystander
        assert not lost.failed and not other.failed and len(other.tokens) == 100
        await it.settled()
        assert [x.id for x in it.reports.sessions()] == ["b"]
        assert it.reports.engine().counters["keep_failures"] == 1
    assert "could not be kept" in caplog.text


async def test_a_sequence_lost_between_its_prompt_and_its_batch_is_reported(monkeypatch, caplog):
    def nowhere(sequence: Sequence, caches: Caches) -> None:
        raise RuntimeError("no batch")

    async with engine("llama") as it:
        with monkeypatch.context() as patch:
            patch.setattr(it.owner.batching.batches, "insert", nowhere)
            async with asyncio.timeout(30):
                answer = await it.turn(text(1, 40), A)
        assert answer.failed == "RuntimeError: no batch"
        assert not it.owner.batching.hot_cache.sessions.is_busy((A.tenant, A.id))
        assert (await it.turn(text(1, 40), A)).finished == {0: "length"}
    assert "a round of the engine failed" in caplog.text


async def test_a_prefetch_whose_kv_is_no_use_is_counted(tmp_path: Path):
    async with engine("llama", tmp_path) as it:
        await it.asleep_after(text(1, 200), A)
        store = it.store

        def restore(match: Match, out: KVRun) -> Restored:
            return replace(store.restore(match, out=out), run=[])

        surround(it, restore=restore)
        assert not (await it.verbs.prefetch(A)).report.hot
        assert it.reports.engine().counters["rebuild_failures"] == 1


async def test_a_session_that_is_deleted_while_it_wakes_stays_deleted(tmp_path: Path):
    async with engine("llama", tmp_path) as it:
        await it.asleep_after(text(1, 200), A)
        reading, go_on = hold_restores(it)
        prefetch = asyncio.create_task(it.verbs.prefetch(A))
        assert await asyncio.to_thread(reading.wait, 30)
        assert (await it.verbs.forget(A)).report is None
        go_on.set()
        assert (await prefetch).report is None
        assert it.reports.sessions() == []


async def test_a_prefetch_that_begins_during_a_delete_brings_nothing_back(tmp_path: Path):
    """The store is asked for the session just before it removes it."""
    loop = asyncio.get_running_loop()
    async with engine("llama", tmp_path) as it:
        await it.asleep_after(text(1, 200), A)
        store = it.store

        def late(ref: SessionRef) -> bool:
            asyncio.run_coroutine_threadsafe(it.verbs.prefetch(A), loop).result(30)
            return store.forget(ref)

        surround(it, forget=late)
        assert (await it.verbs.forget(A)).report is None


async def test_a_session_that_the_store_lost_is_reported_and_loses_its_pin(tmp_path: Path) -> None:
    one, heard = session("one"), list[tuple[str, SessionRef]]()
    async with engine("llama", tmp_path) as it:
        it.owner.on_change = lambda cause, ref, why: heard.append((cause, ref))
        await it.turn(text(1, 200), one)
        await it.settled()
        await it.verbs.pin(one, True)
        hot = it.owner.batching.hot_cache.sessions
        gone = SessionRef(one.tenant, one.id, b"")
        it.verbs.store_changed(StoreNotice(gone, "budget"))
        assert hot.is_pinned(("tenant", "one"))  # its hot copy is still there to be kept
        await it.verbs.pin(one, False)
        assert (await it.verbs.demote(one, None)).kept is None
        hot.pin(("tenant", "one"), True)
        it.verbs.store_changed(StoreNotice(gone, "budget"))
        assert not hot.is_pinned(("tenant", "one"))
        await asyncio.sleep(0)  # posts of other threads come in order
        assert heard.count(("lost", gone)) == 2


@pytest.mark.parametrize("wakes_by", ["turn", "prefetch"])
async def test_a_session_that_is_unpinned_while_it_comes_back_stays_unpinned(tmp_path, wakes_by):
    one = session("one")
    async with engine("llama", tmp_path) as it:
        first = await it.asleep_after(text(1, 200), one)
        it.store.pin(one, True)  # by an engine before this one
        reading, go_on = hold_restores(it)
        longer = [*text(1, 200), *first.tokens, 5]
        waking = it.turn(longer, one) if wakes_by == "turn" else it.verbs.prefetch(one)
        woken = asyncio.ensure_future(waking)
        assert await asyncio.to_thread(reading.wait, 30)
        await it.verbs.pin(one, False)
        go_on.set()
        await woken
        report = await it.verbs.report(one)
        assert report.hot and not report.pinned
