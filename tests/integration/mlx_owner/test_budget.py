"""Live KV stays inside its budget under any load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from engines.mlx_worker.generation import SequenceSampling
from kvstore.session import CHUNK_TOKENS
from tests.integration.mlx_owner.harness import Answer, Engine, engine, session, text, whole

pytestmark = pytest.mark.mlx

TOKEN_BYTES = 3072  # of the tiny llama: three layers, two heads of 64, K and V, float32
SESSION = 300  # tokens
NEW = [5, 6, 7, 8]
# Three sessions. A running one has 256 tokens of room to grow, and exists twice for a moment when
# it joins or leaves its batch, so fewer than three run at a time.
BUDGET = 3 * (SESSION + 256) * TOKEN_BYTES


class Peak:
    """The most KV that mlx held, looked at often."""

    def __init__(self, it: Engine) -> None:
        self._it = it
        self.nbytes = 0

    async def watch(self) -> None:
        while True:
            self.nbytes = max(self.nbytes, self._it.reports.engine().hot_bytes)
            await asyncio.sleep(0.002)


async def test_twelve_sessions_with_a_hot_budget_for_three(tmp_path: Path):
    async with engine("llama", tmp_path, hot_bytes=BUDGET) as it:
        peak = Peak(it)
        watching = asyncio.create_task(peak.watch())
        histories = {f"s{i}": text(i, SESSION) for i in range(12)}
        for turn in range(2):
            answers = await asyncio.gather(
                *(it.turn(history, session(name)) for name, history in histories.items())
            )
            for name, answer in zip(histories, answers, strict=True):
                assert answer.finished == {0: "length"}, answer
                assert answer.cache is not None
                if turn:
                    known = len(histories[name]) - len(NEW)
                    known = known if answer.cache.source == "hot" else whole(known)
                    assert answer.cache.cached_tokens == known
                histories[name] = histories[name] + answer.tokens + NEW
        watching.cancel()
        await it.settled()
        report = it.reports.engine()
        some = [f"s{i}" for i in (0, 4, 8, 11)]
        fresh = [await it.turn(histories[name]) for name in some]
        last = [await it.turn(histories[name], session(name)) for name in some]
    assert peak.nbytes <= BUDGET
    assert report.idle_hot_bytes <= report.hot_bytes <= BUDGET
    assert report.counters["source.cold-ram"] >= 9
    assert [x.tokens for x in last] == [x.tokens for x in fresh]


async def test_the_peak_of_one_step_is_inside_the_budget_too():
    """mlx's own report of its peak misses nothing, as sampling could."""
    async with engine("llama", hot_bytes=BUDGET) as it:
        await it.turn(text(0, 100))
        mx.reset_peak_memory()
        await asyncio.gather(*(it.turn(text(i, 300), session(f"s{i}")) for i in range(4)))
        peak = mx.get_peak_memory() - it.owner.weight_bytes
    activations = 4 << 20  # of a chunk of 64 tokens: not KV
    assert peak <= BUDGET + activations


async def test_rows_that_outgrow_the_budget_step_back_and_finish_all_the_same(tmp_path: Path):
    """Four rows are let in while they are short; there is room for two once they are long.

    Every position is sampled once: seeded samplers and grammars count on it.
    """
    budget = 4 * (200 + 256) * TOKEN_BYTES

    async def ask(it: Engine, number: int) -> Answer:
        ref = session(f"s{number}") if number % 2 else None
        counting = SequenceSampling(Counting())
        return await it.turn(text(number, 40), ref, sampling=[counting], max_tokens=200)

    async with engine("llama", tmp_path) as roomy:
        expected = await asyncio.gather(*(ask(roomy, i) for i in range(4)))
    async with engine("llama", tmp_path / "small", hot_bytes=budget, prefill_step=512) as it:
        peak = Peak(it)
        watching = asyncio.create_task(peak.watch())
        answers = await asyncio.gather(*(ask(it, i) for i in range(4)))
        watching.cancel()
        assert it.reports.engine().counters["sent_back"] >= 1
    for answer, other in zip(answers, expected, strict=True):
        assert answer.tokens == [i % 400 for i in range(200)]
        np.testing.assert_allclose(answer.logprobs, other.logprobs, atol=1e-3)
    assert peak.nbytes <= budget


async def test_an_answer_that_steps_back_gives_its_name_to_no_other(tmp_path: Path):
    """The first answer is kept, and its chunks are named by its own tokens."""
    prompt = text(1, 40)
    async with engine("llama", tmp_path) as it:
        budget, requests = it.owner.batching.budget, it.owner.batching.requests

        def shortest() -> int:
            return min((y.num_tokens for x in requests.all() for y in x.sequences), default=0)

        sampling = [SequenceSampling(lambda _, x=x: mx.array([x])) for x in (20, 30)]
        reading = asyncio.create_task(
            it.turn(prompt, session("s"), sampling=sampling, max_tokens=400)
        )
        while await it.owner.call(shortest) < 120:
            await asyncio.sleep(0.002)
        roomy, budget.hot_bytes = budget.hot_bytes, 1
        while not it.reports.engine().counters.get("sent_back"):
            await asyncio.sleep(0.002)
        budget.hot_bytes = roomy
        answer = await reading
        await it.settled()
        (record,) = it.store.records()
        salt = session("s").salt
        expected = it.store.maker.of_tokens(salt, np.array(prompt + answer.tokens, np.int32))
    assert set(answer.rows[1]) == {30}
    assert record.names == expected[: record.num_chunks]
    assert record.num_chunks == (len(prompt) + 400 - 1) // CHUNK_TOKENS


class Counting:
    """Token number i is i: a position sampled twice, or never, would show."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._next += 1
        return mx.array([(self._next - 1) % 400])


async def test_pinned_sessions_are_dropped_last(tmp_path: Path):
    async with engine("llama", tmp_path, hot_bytes=BUDGET) as it:
        for name in ("oldest", "older", "old"):
            await it.turn(text(ord(name[-1]), 250), session(name))
            await it.settled()
            if name == "oldest":
                await it.verbs.pin(session(name), True)
        await it.turn(text(9, SESSION), session("new"))
        await it.settled()
        hot = {x.id for x in it.reports.sessions() if x.hot}
    assert "oldest" in hot and "older" not in hot


async def test_a_budget_without_room_for_a_session_is_refused():
    with pytest.raises(ValueError, match="hot_bytes = 100000 is too little"):
        async with engine("llama", hot_bytes=100_000):
            pass


async def test_the_context_is_no_longer_than_the_budget(tmp_path: Path):
    async with engine("llama", tmp_path, hot_bytes=BUDGET) as it:
        limit = it.owner.facts.max_context
        assert SESSION < limit < 600
        peak = Peak(it)
        watching = asyncio.create_task(peak.watch())
        await it.turn(text(1, 200), session("idle"))
        longest = await it.turn(text(2, limit - 100), session("long"), max_tokens=4000)
        watching.cancel()
    assert len(longest.tokens) == 100
    assert peak.nbytes <= BUDGET


async def test_many_turns_leave_no_memory_in_use(tmp_path: Path):
    async with engine("llama", tmp_path, hot_bytes=BUDGET) as it:
        used = []
        for lap in range(3):
            await asyncio.gather(*(it.turn(text(i, 200), session(f"s{i}")) for i in range(8)))
            await it.settled()
            await it.demote_all()
            used.append(it.reports.engine().active_bytes)
            assert lap == 0 or used[-1] <= used[0] + (64 << 10)
