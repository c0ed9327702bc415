"""Generation on the owner thread, without a cold store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engines.config import EngineConfig
from engines.host.work_line import QueueFull
from engines.mlx_worker.generation import SequenceSampling
from engines.mlx_worker.model.loading import UsualSampling
from engines.mlx_worker.owner import Owner
from engines.openai.errors import InvalidRequest
from tests.integration.mlx_owner.harness import begun, engine, read, session, text
from tests.integration.tiny_models import KINDS, tiny_model

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("kind", KINDS)
async def test_an_uneven_batch_answers_as_each_prompt_does_alone(kind: str):
    prompts = [text(i, 20 + 37 * i) for i in range(4)]
    async with engine(kind) as it:
        alone = [await it.turn(x) for x in prompts]
        together = await asyncio.gather(*(it.turn(x) for x in prompts))
    assert [x.tokens for x in together] == [x.tokens for x in alone]
    assert all(len(x.tokens) == 8 and x.finished == {0: "length"} for x in together)


async def test_an_edited_turn_reuses_what_it_still_shares():
    one = session("one")
    async with engine("llama") as it:
        first = await it.turn(text(1, 50), one)
        edited = text(1, 40) + text(9, 20)
        second = await it.turn(edited, one)
        fresh = await it.turn(edited)
        again = await it.turn(text(1, 50), one)
    assert second.cache.header() == "hot; tokens=40; reason=diverged"
    assert second.tokens == fresh.tokens
    assert again.tokens == first.tokens


async def test_another_session_of_the_tenant_shares_a_prefix_and_one_of_another_does_not():
    prompt = text(1, 80)
    async with engine("llama") as it:
        await it.turn(prompt, session("one"))
        shared = await it.turn(prompt[:60] + text(3, 10), session("two"))
        strange = await it.turn(prompt[:60] + text(3, 10), session("one", "stranger"))
        first = await it.turn(prompt + [7], session("one"))
        fresh = await it.turn(prompt + [7])
    assert first.tokens == fresh.tokens, "its copy was written to"
    assert shared.cache.header() == "hot; tokens=60"
    assert strange.cache.source == "miss"
    assert shared.tokens == strange.tokens
    assert first.cache.cached_tokens == 80


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "mamba2"])
async def test_a_cache_that_cannot_be_cut_is_reused_only_if_the_prompt_extends_it(kind: str):
    one = session("one")
    async with engine(kind) as it:
        first = await it.turn(text(1, 50), one)
        edited = await it.turn(text(1, 45) + [5, 6], one)
        extended = await it.turn(text(1, 45) + [5, 6] + edited.tokens + [7], one)
        fresh = await it.turn(text(1, 45) + [5, 6] + edited.tokens + [7])
    assert len(first.tokens) == 8
    assert edited.cache.header() == "miss; tokens=0; reason=diverged"
    assert extended.cache.header() == "hot; tokens=55"
    assert extended.tokens == fresh.tokens


async def test_n_rows_share_one_prefill_and_the_first_is_the_sessions():
    one = session("one")
    constant = SequenceSampling(sampler=lambda logprobs: mx.array([123]))
    async with engine("llama") as it:
        answer = await it.turn(
            text(1, 50), one, sampling=(SequenceSampling(), constant, SequenceSampling())
        )
        longer = text(1, 50) + answer.tokens + [7]
        second = await it.turn(longer, one)
    assert answer.rows[1] == [123] * 8
    assert answer.rows[0] == answer.rows[2] != answer.rows[1]
    assert second.cache.cached_tokens == 58


async def test_more_rows_than_the_batch_has_are_served_in_groups():
    async with engine("llama", max_batch=2) as it:
        answer = await it.turn(text(1, 50), session("one"), sampling=[SequenceSampling()] * 5)
    assert sorted(answer.rows) == [0, 1, 2, 3, 4]
    assert len({tuple(x) for x in answer.rows.values()}) == 1
    assert set(answer.finished.values()) == {"length"}


async def test_a_stopped_row_leaves_its_slot_and_the_others_go_on():
    async with engine("llama", max_batch=2) as it:
        stream = it.submit(
            text(1, 50),
            session("one"),
            max_tokens=2000,
            sampling=(SequenceSampling(), SequenceSampling()),
        )
        waiting = asyncio.create_task(it.turn(text(2, 20), session("two")))
        reading = await begun(stream)
        assert not waiting.done()
        stream.stop(0)
        assert (await asyncio.wait_for(waiting, 30)).finished == {0: "length"}
        assert not reading.done()
        stream.stop(1)
        answer = await asyncio.wait_for(reading, 30)
    assert answer.finished == {0: "cancelled", 1: "cancelled"}


async def test_what_a_cancelled_turn_computed_is_kept():
    one = session("one")
    async with engine("llama") as it:
        stream = it.submit(text(1, 50), one, max_tokens=4000)
        reading = await begun(stream)
        stream.cancel()
        answer = await asyncio.wait_for(reading, 30)
        again = await it.turn(text(1, 50) + answer.tokens + [7], one)
        assert not it.reports.engine().num_running
    assert answer.finished == {0: "cancelled"}
    assert again.cache.source == "hot"
    assert again.cache.cached_tokens == 50 + len(answer.tokens)


class WatchedLayer:
    """A layer that says when the model computes; ``at`` a step it does something."""

    def __init__(self, layer: Any, at: int, what: Callable[[], None]) -> None:
        self._layer, self._at, self._what = layer, at, what
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_steps += 1
        if self.num_steps == self._at:
            self._what()
        return self._layer(*args, **kwargs)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("with_store", [False, True], ids=["hot", "cold"])
async def test_a_prefill_that_is_abandoned_ends_with_its_step_and_is_gone_on_with(
    kind: str, with_store: bool, tmp_path: Path
):
    one, prompt, at = session("one"), text(1, 64 * 6), 3
    async with engine(kind, tmp_path if with_store else None) as it:
        leaving: list[Callable[[], None]] = []
        layers = it.owner.loaded.model.model.layers
        watched = WatchedLayer(layers[0], at, lambda: leaving[0]())
        layers[0] = watched
        stream = it.submit(prompt, one)
        leaving.append(stream.cancel)
        answer = await asyncio.wait_for(read(stream), 30)
        await it.owner.call(lambda: None)
        steps = watched.num_steps
        if with_store:
            await it.settled()
            await it.demote_all()
        again = await it.turn(prompt, one)
        layers[0] = watched._layer
    assert (answer.finished, answer.tokens) == ({0: "cancelled"}, [])
    assert steps == at, "a step was computed that no request waited for"
    assert again.cache is not None and again.finished == {0: "length"}
    assert again.cache.source == ("cold-ram" if with_store else "hot")
    assert again.cache.cached_tokens == at * 64


async def test_a_turn_that_is_cancelled_while_it_waits_never_starts():
    async with engine("llama", max_batch=1) as it:
        running = it.submit(text(1, 50), max_tokens=4000)
        waiting = it.submit(text(2, 50), session("two"))
        waiting.cancel()
        answer = await asyncio.wait_for(read(waiting), 30)
        running.cancel()
        await read(running)
        assert it.owner.num_waiting == 0
    assert answer.cache is None and answer.finished == {0: "cancelled"}


class Boom(Exception):
    pass


def _bad_processor(after: int) -> Any:
    calls = 0

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Boom("no more")
        return logits

    return process


def _bad_sampler(logprobs: mx.array) -> mx.array:
    raise Boom("no more")


BAD = [SequenceSampling(None, (_bad_processor(x),)) for x in (0, 3)]


@pytest.mark.parametrize("bad_sampling", [*BAD, SequenceSampling(_bad_sampler)])
async def test_a_processor_or_sampler_that_raises_kills_its_own_request_only(bad_sampling):
    async with engine("llama") as it:
        expected = await it.turn(text(1, 50), max_tokens=20)
        good = it.submit(text(1, 50), max_tokens=20)
        bad = it.submit(text(2, 30), sampling=(bad_sampling,), max_tokens=20)
        answers = await asyncio.gather(read(good), read(bad))
    assert answers[0].tokens == expected.tokens
    assert answers[1].failed == "Boom: no more"
    assert len(answers[1].tokens) < 20


async def test_an_error_of_a_processor_after_the_last_token_spoils_nothing():
    async with engine("llama") as it:
        answer = await it.turn(
            text(1, 50), sampling=(SequenceSampling(None, (_bad_processor(8),)),)
        )
    assert answer.failed == "" and len(answer.tokens) == 8


async def test_processors_of_the_wrong_shape_are_their_requests_fault():
    bad = SequenceSampling(None, (lambda tokens, logits: logits[:, :5],))
    async with engine("llama") as it:
        odd = SequenceSampling(lambda logprobs: mx.array([1, 2]))
        for sampling in (bad, odd):
            answer = await it.turn(text(1, 50), sampling=(sampling,))
            assert "a sampler or processor returned shape" in answer.failed


async def test_a_step_that_fails_takes_its_batch_along_and_the_engine_lives_on():
    async with engine("llama") as it:
        expected = await it.turn(text(1, 50))
        stream = it.submit(text(2, 50), session("two"), max_tokens=4000)
        reading = await begun(stream)
        model = it.owner.loaded.model
        layers, model.model.layers = model.model.layers, [Boom]
        answer = await asyncio.wait_for(reading, 30)
        model.model.layers = layers
        again = await it.turn(text(1, 50))
    assert "AttributeError" in answer.failed
    assert again.tokens == expected.tokens


async def test_prompts_that_cannot_fit_are_refused_with_both_numbers():
    async with engine("llama", max_context=100) as it:
        assert it.owner.facts.max_context == 100
        with pytest.raises(InvalidRequest, match="100 tokens.*120 tokens"):
            it.submit(text(1, 120))
        answer = await it.turn(text(1, 95), max_tokens=50)
    assert len(answer.tokens) == 5


async def test_the_line_is_bounded():
    async with engine("llama", max_batch=1) as it:
        running = [await begun(it.submit(text(i, 50), max_tokens=4000)) for i in range(2)]
        streams = [it.submit(text(2, 50), session("x")) for _ in range(16)]
        with pytest.raises(QueueFull, match="16 requests are waiting"):
            it.submit(text(2, 50), session("x"))
        assert it.owner.num_waiting == 16
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*(read(x) for x in streams))
        assert it.owner.num_waiting == 0
        assert not any(x.done() for x in running)


async def test_rows_that_outgrow_their_bucket_go_on_as_if_nothing_happened():
    """1,000 + 60 tokens cross the first bound; a second row keeps the bucket alive meanwhile."""
    prompt = text(1, 1000)
    async with engine("llama", prefill_step=512) as it:
        mixed = await asyncio.gather(
            it.turn(prompt, max_tokens=60), it.turn(text(2, 40), max_tokens=80)
        )
        alone = await it.turn(prompt, session("s"), max_tokens=60)
        short = await it.turn(text(2, 40), max_tokens=80)
    assert mixed[0].tokens == alone.tokens and len(alone.tokens) == 60
    assert mixed[1].tokens == short.tokens


async def test_a_stop_sequence_is_found_across_the_bound_of_a_bucket():
    script = list(range(100, 140))
    ends = tuple(script[20:29])  # tokens 1,020 to 1,028 of the row: the bound lies in between
    async with engine("llama", prefill_step=512) as it:
        answer = await it.turn(
            text(1, 1000),
            max_tokens=40,
            sampling=(SequenceSampling(_scripted(script)),),
            stop=[ends],
        )
    assert answer.tokens == script[:29] and answer.finished == {0: "stop"}


def _scripted(tokens: list[int]) -> Any:
    remaining = iter(tokens)
    return lambda logprobs: mx.array([next(remaining, 0)])


async def test_a_defect_of_the_loop_fails_what_runs_and_the_next_turn_is_right(caplog):
    async with engine("llama") as it:
        expected = await it.turn(text(1, 50))
        reading = await begun(it.submit(text(2, 50), session("x"), max_tokens=4000))
        it.owner.post(lambda: 1 // 0)
        answer = await asyncio.wait_for(reading, 30)
        again = await it.turn(text(1, 50))
    assert "ZeroDivisionError" in answer.failed
    assert again.tokens == expected.tokens
    assert it.owner.ended.is_set()


async def test_the_sampling_of_a_models_files_is_known(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    loaded = replace(tiny_model("llama"), path=tmp_path)
    owner = Owner(lambda: loaded, EngineConfig(), "tiny")
    await owner.start()
    try:
        assert owner.facts.usual_sampling == UsualSampling(temperature=0.6, top_k=20)
    finally:
        await owner.close()
