"""Measuring on an engine that serves: the same figures, and requests wait for one step at most."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from engines.calibration.instrument import Interrupted, LayerNotice, StateNotice
from engines.mlx_worker.cache.layout import probe
from engines.mlx_worker.measuring.instrument import MlxInstrument
from tests.integration.calibration.surveys import instrument_of
from tests.integration.mlx_owner.harness import Engine, engine, read, session, text
from tests.integration.tiny_models import tiny_model

pytestmark = pytest.mark.mlx

LLAMA, MAMBA = (pytest.param(x, marks=pytest.mark.thorough) for x in ("llama", "mamba2"))


def serving(it: Engine) -> MlxInstrument:
    owner = it.owner
    assert owner.held is not None and owner.codecs is not None
    return MlxInstrument(owner.loaded, owner.plan, None, owner.idle_steps, owner.held, 64)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", MAMBA])
async def test_it_finds_what_a_model_of_its_own_finds(kind: str, tmp_path: Path) -> None:
    alone = instrument_of(kind)
    prompt, rest = text(1, 300), text(2, 40)
    async with engine(kind, tmp_path, codec="auto", gate={}) as it:
        beside = serving(it)
        assert (beside.fingerprint, beside.layout) == (alone.fingerprint, alone.layout)
        assert beside.states == alone.states
        ropes = await asyncio.to_thread(lambda: (beside.ropes, beside.window_ropes()))
        assert ropes == (alone.ropes, alone.window_ropes())
        session = await asyncio.to_thread(beside.prefill, prompt)
        whole = alone.prefill(prompt)
        for pair, other in zip(session.run, whole.run, strict=True):
            for array, exact in zip(pair, other, strict=True):
                assert array.dtype == exact.dtype
                np.testing.assert_allclose(array, exact, atol=1e-4)
        expected = alone.log_probs(whole, rest)
        scores = await asyncio.to_thread(beside.log_probs, session, rest)
        np.testing.assert_allclose(scores, expected, atol=1e-2)
        first = await asyncio.to_thread(beside.prefill, prompt[:200])
        further = await asyncio.to_thread(beside.prefill, prompt, first)
        assert further.num_tokens == 300
        if kind == "llama":
            assert further.run[0][0].shape[1] == 300
        again = await asyncio.to_thread(beside.log_probs, further, rest)
        np.testing.assert_allclose(again, expected, atol=1e-2)
        assert it.owner.held.nbytes == 0


@pytest.mark.parametrize("kind", [LLAMA, "gemma3_text", "qwen3_next"])
async def test_it_sees_what_a_model_of_its_own_sees(kind: str, tmp_path: Path) -> None:
    """Cut into other steps, so by other draws: the notices are alike, not the same."""
    alone = instrument_of(kind)
    tokens = text(1, 200)
    async with engine(kind, tmp_path, codec="auto", gate={}) as it:
        beside, seen, own = serving(it), [], []
        run = await asyncio.to_thread(beside.observe, tokens, 150, seen.append)
        for pair, other in zip(run, alone.observe(tokens, 150, own.append), strict=True):
            np.testing.assert_allclose(pair[1], other[1], atol=1e-4)
        assert it.owner.held.nbytes == 0
    found, expected = (
        [x for x in notices if isinstance(x, LayerNotice)] for notices in (seen, own)
    )
    states = [{x.number for x in notices if isinstance(x, StateNotice)} for notices in (seen, own)]
    assert states[0] == states[1]
    assert len(expected) == len(alone.layout.layers)
    by_layer: dict[int, float] = {}
    for notice in found:
        squares = sum(float(np.square(x).sum()) for x in notice.gradients)
        by_layer[notice.layer] = by_layer.get(notice.layer, 0.0) + squares
    for notice in expected:
        squares = sum(float(np.square(x).sum()) for x in notice.gradients)
        assert by_layer[notice.layer] == pytest.approx(squares, rel=0.5)


async def test_a_request_waits_for_one_step_at_most(tmp_path: Path) -> None:
    """Counted on the owner thread: what a client sees of its answer may come much later."""
    async with engine("llama", tmp_path, codec="auto", gate={}) as it:
        steps, ends = it.owner.idle_steps, threading.Event()
        beside: list[int] = []  # for each step, the requests that the owner thread knew of

        def step() -> None:
            beside.append(len(it.owner.batching.requests.all()))
            time.sleep(0.001)

        def measure() -> None:
            while not ends.is_set():
                steps.run(step)

        measuring = asyncio.create_task(asyncio.to_thread(measure))
        try:
            for number in range(6):
                while len(beside) < 3 * (number + 1):
                    await asyncio.sleep(0.001)
                before = len(beside)
                stream = it.submit(text(10 + number, 200), max_tokens=20)
                known = await it.owner.call(lambda: len(beside))  # after the request, in its queue
                assert known - before <= 1
                assert (await read(stream)).finished == {0: "length"}
        finally:
            ends.set()
            await measuring
        assert beside == [0] * len(beside)


async def test_its_memory_goes_to_requests_that_need_it(tmp_path: Path) -> None:
    """So little is allowed that the request and the measured prefix do not fit together."""
    tokens, rest = text(5, 700), text(6, 300)
    loaded = tiny_model("llama")
    nbytes = probe(loaded.model).cost.row_bytes(1024)
    settings = {"hot_bytes": 4 * nbytes, "max_context": 1024}
    async with engine("llama", tmp_path, codec="auto", gate={}, **settings) as it:
        owner, beside = it.owner, serving(it)
        held = owner.held
        assert held is not None
        asleep = await asyncio.to_thread(beside.prefill, tokens)
        await owner.call(lambda: held.begin(asleep))
        assert 0 < held.nbytes <= nbytes
        assert it.reports.engine().hot_bytes < held.nbytes, "it belongs to no session"
        first = [it.submit(text(20 + i, 700), session(str(i)), max_tokens=8) for i in range(4)]
        for stream in first:
            async for _ in stream.events():
                pass
        assert held.nbytes == 0
        # And the measurement begins again: the result is the same.
        scores = await asyncio.to_thread(beside.log_probs, asleep, rest)
        assert scores.shape[0] == len(rest) and np.isfinite(scores).all()


async def test_closing_the_owner_interrupts(tmp_path: Path) -> None:
    async with engine("llama", tmp_path, codec="auto", gate={}) as it:
        beside = serving(it)

        def measure() -> None:
            while True:
                beside.prefill(text(3, 900))

        measuring = asyncio.create_task(asyncio.to_thread(measure))
        while not it.owner.idle_steps.num_done:
            await asyncio.sleep(0.001)
        await it.owner.close()
        with pytest.raises(Interrupted):
            await asyncio.wait_for(measuring, 10)
