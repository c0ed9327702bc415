"""The choice of a token by seeds, biases and penalties, and the log-probabilities of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.worker_http.stage import Open

pytestmark = pytest.mark.mlx


async def test_logprobs(toy: Open) -> None:
    async with toy() as stage:
        stage.script("Hé ☃")
        reply = await stage.chat(logprobs=True, top_logprobs=3)
        chunks = await stage.chunks(logprobs=True)
    content = reply.choices[0].logprobs.content
    assert bytes(b for x in content for b in x.bytes).decode() == "Hé ☃"
    assert all(len(x.top_logprobs) == 3 for x in content)
    assert all(x.top_logprobs[0].token == x.token for x in content)
    assert all(x.logprob <= 0 for x in content)
    streamed = [x for c in chunks if (lp := c.choices[0].logprobs) for x in lp.content]
    assert [x.token for x in streamed] == [x.token for x in content]


async def test_a_seed_repeats_beside_other_requests(toy: Open) -> None:
    """No script: the toy's noise is sampled, so two answers agree only by their seed."""
    async with toy() as stage:
        options = {"max_tokens": 12, "temperature": 2.0, "logprobs": True}

        async def ids(**fields: Any) -> list[list[str]]:
            reply = await stage.chat(**options, **fields)
            return [[x.token for x in choice.logprobs.content] for choice in reply.choices]

        alone = await ids(seed=7)
        beside = await asyncio.gather(ids(seed=7), ids(seed=8), ids(seed=7, n=2), ids())
    assert beside[0] == alone
    assert beside[1] != alone
    assert beside[2][0] == alone[0]
    assert beside[2][1] != alone[0]
    assert beside[3] != alone


async def test_logit_bias_and_penalties_reach_the_row(toy: Open) -> None:
    async with toy() as stage:
        stage.script("a")
        (banned,) = stage.tokenizer.encode("a")
        reply = await stage.chat(logit_bias={str(banned): -100}, max_tokens=1, temperature=0)
    assert reply.choices[0].message.content != "a"
