"""Responses as OpenAI's own client sees them; real processes, the fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from benchmarks.stacks.fake_stack import MODEL, FakeStack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    with FakeStack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: FakeStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as sdk:
        yield sdk


def test_a_response(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hello big world")
    assert response.output_text == "You said: hello big world"
    assert response.usage is not None and response.usage.input_tokens == 4


@pytest.mark.parametrize("fault", ["", "fault=bytes"])
def test_a_stream(client: openai.OpenAI, fault: str) -> None:
    told: list[Any] = []
    with client.responses.stream(
        model=MODEL, input="hello big world", metadata={"fake": fault}
    ) as stream:
        told += stream
        final = stream.get_final_response()
    assert final.output_text == "You said: hello big world"
    assert final.usage is not None and final.usage.output_tokens == 5
    deltas = [x.delta for x in told if x.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text and len(deltas) == 5
    assert told[-1].type == "response.completed"


def test_an_answer_of_one_token_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hello", max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("fault", ["error-event", "cut", "no-done", "garbage"])
def test_a_stream_that_fails_says_so(client: openai.OpenAI, fault: str) -> None:
    stream = client.responses.create(
        model=MODEL, input="hello", stream=True, metadata={"fake": f"fault={fault} after=1"}
    )
    *_, last = stream
    assert last.type == "response.failed"
    assert last.response.error is not None and last.response.error.message


def test_refusals_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-nope", input="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="word " * 40_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
