"""Text completions, and the tokens of a prompt: those that an answer to it is charged for."""

from __future__ import annotations

import httpx2
import openai
import pytest

from tests.integration.worker_http.stage import HELLO, Open

pytestmark = pytest.mark.mlx


async def test_text_completions(toy: Open) -> None:
    async with toy() as stage:
        stage.script(" Paris.")
        create = stage.client.completions.create
        one = await create(model="toy", prompt="The capital of France is", logprobs=2)
        many = await create(model="toy", prompt=["A", "B "], n=2, echo=True)
        ids = await create(model="toy", prompt=stage.tokenizer.encode("The"), max_tokens=2)
        stream = await create(
            model="toy",
            prompt=["A", "B"],
            stream=True,
            echo=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert one.choices[0].text == " Paris."
    scores = one.choices[0].logprobs
    assert "".join(scores.tokens) == " Paris."
    assert scores.text_offset[0] == 0
    assert all(x in y for x, y in zip(scores.tokens, scores.top_logprobs, strict=True))
    assert [x.text for x in many.choices] == ["A Paris."] * 2 + ["B  Paris."] * 2
    assert [x.index for x in many.choices] == [0, 1, 2, 3]
    assert ids.choices[0].finish_reason == "length"
    for index, text in enumerate(["A Paris.", "B Paris."]):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(x.text for x in mine) == text
        assert mine[-1].finish_reason == "stop"
    assert chunks[-1].usage.prompt_tokens == 2


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
