"""The tokens of a prompt are those that an answer to it would be charged for."""

from __future__ import annotations

import httpx2
import openai
import pytest

from tests.integration.worker_http.stage import HELLO, Open

pytestmark = pytest.mark.mlx


async def test_a_chat_has_the_tokens_that_it_is_answered_with(toy: Open) -> None:
    async with toy() as stage:
        stage.script("fine")
        asked = {"model": "toy", "messages": HELLO}
        counted = await stage.client.post("../tokenize", body=asked, cast_to=httpx2.Response)
        reply = await stage.chat()
        text = await stage.client.post(
            "../detokenize",
            body={"model": "toy", "tokens": counted.json()["tokens"]},
            cast_to=httpx2.Response,
        )
    said = counted.json()
    assert said["tokens"] == list(stage.owner.submitted[0].prompt)
    assert said["count"] == len(said["tokens"]) == reply.usage.prompt_tokens
    assert said["max_model_len"] == stage.owner.facts.max_context
    assert HELLO[0]["content"] in text.json()["prompt"]


async def test_a_text_with_its_pieces(toy: Open) -> None:
    async with toy() as stage:
        asked = {"model": "toy", "prompt": "one two", "return_token_strs": True}
        counted = await stage.client.post("../tokenize", body=asked, cast_to=httpx2.Response)
    said = counted.json()
    assert "".join(said["token_strs"]).endswith("one two")
    assert len(said["token_strs"]) == said["count"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("tokenize", {"model": "toy", "messages": []}),
        ("tokenize", {"model": "toy"}),
        ("detokenize", {"model": "toy", "tokens": [1 << 30]}),
        ("detokenize", {"model": "toy", "tokens": "x"}),
    ],
)
async def test_what_has_no_tokens_is_refused(toy: Open, path: str, body: object) -> None:
    async with toy() as stage:
        with pytest.raises(openai.BadRequestError):
            await stage.client.post(f"../{path}", body=body, cast_to=httpx2.Response)
