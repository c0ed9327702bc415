"""The same endpoints before the real owner thread and a real (random) model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker_http.stage import CITY, asking, staged, started_owner
from tests.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slot(tmp_path: Path, stream: bool) -> None:
    """There is one slot, and the answer that holds it is thousands of tokens long."""
    async with started_owner(1) as owner, staged(owner, tiny_tokenizer(tmp_path)) as stage:
        leaving = asking(stage, stream=stream)
        async with asyncio.timeout(60):
            while not len(owner.batching.batches):
                await asyncio.sleep(0.01)
            assert not leaving.done()
            leaving.cancel()
            reply = await stage.chat(max_tokens=4)
        assert reply.usage.completion_tokens <= 4
        admitted = len(owner.batching.prefiller.admitted)
        assert (len(owner.batching.batches), admitted, owner.num_waiting) == (0, 0, 0)


async def test_with_the_real_owner(tmp_path: Path) -> None:
    async with started_owner(4) as owner, staged(owner, tiny_tokenizer(tmp_path)) as stage:
        options = {"max_tokens": 8, "logprobs": True, "top_logprobs": 2}

        async def tokens(**fields: Any) -> list[str]:
            reply = await stage.chat(**options, **fields)
            return [x.token for x in reply.choices[0].logprobs.content]

        alone = await tokens(seed=5, presence_penalty=1)
        beside = await asyncio.gather(
            tokens(seed=5, presence_penalty=1),
            tokens(seed=6, top_p=0.9, extra_body={"top_k": 20}),
            tokens(temperature=0),
        )
        wanted = {"type": "json_schema", "json_schema": {"name": "p", "schema": CITY}}
        shaped = await stage.chat(response_format=wanted, max_tokens=400, seed=2, n=2)
    assert beside[0] == alone
    for choice in shaped.choices:
        assert choice.finish_reason == "length" or list(json.loads(choice.message.content))
