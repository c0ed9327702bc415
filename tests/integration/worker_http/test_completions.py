"""Text completions."""

from __future__ import annotations

import pytest

from tests.integration.worker_http.stage import Open

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
