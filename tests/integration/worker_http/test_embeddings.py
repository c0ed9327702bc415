"""Embeddings of a real (random) model: its own hidden states, beside any other work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest
from tokenizers import normalizers

from engines.mlx_worker.embeddings import MAX_WAITING, Embedder, HiddenStates, inner_of, pooling_of
from tests.integration.worker_http.stage import Open, Stage, staged, started_owner
from tests.tiny_tokenizer import tiny_tokenizer
from tests.waiting import eventually

pytestmark = pytest.mark.mlx

LONG = [5 + i % 300 for i in range(200)]


@asynccontextmanager
async def embedding(folder: Path, step: int = 16, kind: str = "llama") -> AsyncIterator[Stage]:
    async with (
        started_owner(4, kind) as owner,
        staged(owner, tiny_tokenizer(folder), embedder=Embedder(owner, step)) as stage,
    ):
        yield stage


async def of(stage: Stage, given: Any, **more: Any) -> list[list[float]]:
    answer = await stage.client.embeddings.create(model="toy", input=given, **more)
    assert [x.index for x in answer.data] == list(range(len(answer.data)))
    return [x.embedding for x in answer.data]


def asking(stage: Stage, num: int, given: Any) -> list[Any]:
    return [asyncio.create_task(of(stage, given)) for _ in range(num)]


async def states(stage: Stage, tokens: list[int]) -> Any:
    """The model's own hidden states, all at once and without a cache."""

    def compute() -> Any:
        model = stage.owner.loaded.model
        return np.array(model.model(mx.array(tokens)[None])[0].astype(mx.float32))

    return await stage.owner.call(compute)


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("step", [1, 7, 512])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
async def test_a_vector_is_the_mean_of_the_models_states(tmp_path: Path, step: int, kind: str):
    async with embedding(tmp_path, step, kind) as stage:
        (vector,) = await of(stage, LONG[:30])
        wanted = unit((await states(stage, LONG[:30])).mean(axis=0))
    assert np.allclose(vector, wanted, atol=1e-5)
    assert np.isclose(np.linalg.norm(vector), 1, atol=1e-5)


def test_models_that_were_made_for_it_give_their_last_state(tmp_path: Path):
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    modes = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    file.write_text(json.dumps(modes))
    assert pooling_of(tmp_path) == "last" == pooling_of(Path("mlx/Qwen3-Embedding-0.6B-4bit"))
    file.write_text("[]")
    assert pooling_of(tmp_path) == "mean" == pooling_of(None)


async def test_the_last_state_is_that_of_the_whole_text(tmp_path: Path):
    async with embedding(tmp_path) as stage:
        owner = stage.owner
        read = HiddenStates(owner.loaded.model, inner_of(owner.loaded.model), "last")
        await owner.call(partial(read.feed, LONG[:20], last=False))
        await owner.call(partial(read.feed, LONG[20:30], last=True))
        wanted = (await states(stage, LONG[:30]))[-1]
    assert np.allclose(read.pooled(), wanted, atol=1e-4)


@pytest.mark.parametrize("given", ["one", ["one", "two three"], [5, 6, 7], [[5, 6], [7]]])
async def test_every_form_of_input(tmp_path: Path, given: Any):
    async with embedding(tmp_path) as stage:
        answer = await stage.client.embeddings.create(model="toy", input=given)
        floats = await of(stage, given, encoding_format="float")
        texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        encode = stage.tokenizer.encode
        ids = [encode(x) if isinstance(x, str) else x for x in texts]
        wanted = [unit((await states(stage, x)).mean(axis=0)) for x in ids]
    # The client asks for base64 by itself.
    assert np.allclose([x.embedding for x in answer.data], floats, atol=1e-6)
    assert np.allclose(floats, wanted, atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))


async def test_fewer_dimensions_are_a_vector_of_length_one_again(tmp_path: Path):
    async with embedding(tmp_path) as stage:
        (whole,), (short,) = await of(stage, "one"), await of(stage, "one", dimensions=5)
    assert len(short) == 5 < len(whole)
    assert np.allclose(short, unit(np.array(whole[:5])), atol=1e-5)


async def test_answers_go_on_meanwhile(tmp_path: Path):
    """A chat that comes while a long text is read, one token at a time, ends before it."""
    async with embedding(tmp_path, step=1) as stage:
        (wanted,) = await of(stage, LONG)
        reading = asyncio.create_task(of(stage, [LONG] * 6))
        await asyncio.sleep(0.05)
        reply = await stage.chat(max_tokens=4)
        assert not reading.done()
        other = await of(stage, "short")  # does not wait for all of the other request's texts
        assert not reading.done()
        vectors = await reading
    assert reply.usage.completion_tokens <= 4 and len(other) == 1
    assert np.allclose(vectors, [wanted] * 6, atol=1e-5)


async def test_a_client_that_leaves_ends_it(tmp_path: Path):
    async with embedding(tmp_path, step=1) as stage:
        reading = asyncio.create_task(of(stage, [LONG] * 500))
        await asyncio.sleep(0.1)
        reading.cancel()
        async with asyncio.timeout(60):
            await of(stage, [LONG])


WRONG: dict[str, list[dict[str, Any]]] = {
    "input": [
        *({"input": x} for x in ([], "", ["a", ""], [[1], []], [10**6], [5] * 50_000, {"a": 1})),
        {"input": ["a", "   "]},  # nothing to this tokenizer
    ],
    "dimensions": [{"input": "a", "dimensions": x} for x in (0, 4096)],
    "encoding_format": [{"input": "a", "encoding_format": "hex"}],
}


async def test_what_cannot_be_embedded(tmp_path: Path):
    async with embedding(tmp_path) as stage:
        stage.tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
        for param, body in [(param, x) for param, bodies in WRONG.items() for x in bodies]:
            with pytest.raises(openai.BadRequestError) as caught:
                asked = {"model": "toy", **body}
                await stage.client.post("/embeddings", body=asked, cast_to=object)
            assert caught.value.param == param, body
        assert len(await of(stage, "still there")) == 1


async def test_an_engine_or_a_model_without_it_says_so(tmp_path: Path, toy: Open):
    async with toy() as stage:
        with pytest.raises(openai.NotFoundError) as caught:
            await of(stage, "a")
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    async with embedding(tmp_path, kind="mamba2") as stage:
        with pytest.raises(openai.NotFoundError) as caught:
            await of(stage, "a")
        assert caught.value.code == "not_supported"
        assert inner_of(stage.owner.loaded.model) is None
        assert await stage.chat(max_tokens=2)


async def test_a_long_text_waits_for_memory_and_a_short_one_does_not(tmp_path: Path):
    async with started_owner(1) as owner:
        embedder = Embedder(owner, 16, wait_s=0.3)
        async with staged(owner, tiny_tokenizer(tmp_path), embedder=embedder) as stage:
            # Two answers run, one in the spare place, and another waits.
            ask = partial(stage.chat, max_tokens=3000, extra_body={"ignore_eos": True})
            running = [asyncio.create_task(ask()) for _ in range(3)]
            await eventually(lambda: owner.num_waiting)
            assert len(await of(stage, LONG[:16])) == 1
            with pytest.raises(openai.RateLimitError):
                await of(stage, LONG)
            for task in running:
                task.cancel()
            assert len(await of(stage, LONG)) == 1


@pytest.mark.parametrize(("step_s", "fewest", "most"), [(0.001, 4, 9), (2.0, 16, 16)])
async def test_steps_are_short_where_the_engine_is_slow(tmp_path, step_s, fewest, most):
    """A short answer waits for several of them."""
    readings = [0.0]

    def clock() -> float:
        readings.append(readings[-1] + step_s)
        return readings[-1]

    async with started_owner(1) as owner:
        embedder = Embedder(owner, 128, clock=clock)
        async with staged(owner, tiny_tokenizer(tmp_path), embedder=embedder) as stage:
            await of(stage, [LONG[:128]] * 4)
        assert fewest <= (len(readings) - 1) // 2 <= most


async def test_requests_take_turns_and_no_more_wait_than_may(tmp_path: Path):
    async with embedding(tmp_path, step=1) as stage:
        many = asking(stage, MAX_WAITING + 11, [LONG[:10]] * 50)
        while sum(x.done() for x in many) < 10:
            await asyncio.sleep(0.01)
        refused = [x for x in many if x.done()]
        assert all(isinstance(x.exception(), openai.RateLimitError) for x in refused)
        assert len(refused) == 10  # one is under way, the others wait
        for task in many[MAX_WAITING // 8 :]:
            task.cancel()
        await asyncio.gather(*many[MAX_WAITING // 8 :], return_exceptions=True)
        async with asyncio.timeout(60):  # its texts come after one of each of the others
            (other,) = asking(stage, 1, [LONG[:5]] * 4)
            assert len(await other) == 4
        assert not any(x.done() for x in many[: MAX_WAITING // 8])
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        async with asyncio.timeout(60):
            assert len(await of(stage, "the line is empty again")) == 1
