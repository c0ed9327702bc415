"""Images through OpenAI's and Anthropic's own clients; real processes, a fake engine that sees."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from benchmarks.stacks.fake_stack import FakeStack
from tests.unit.gateway.test_images import DIALECTS, PNG, looking, user

SEEING = "fake-vision"
# The fake engine repeats its input, in order.
SAID = "You said: look <image> well?"
CHAT, INPUT, BLOCKS = ([user(*looking(path, PNG))] for path in DIALECTS)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    named = {"served_model_name": SEEING}
    with FakeStack(tmp_path_factory.mktemp("seeing"), engine=named) as running:
        yield running.url


def test_all_three_dialects_show_the_same(seeing: str) -> None:
    with openai.OpenAI(base_url=f"{seeing}/v1", api_key="any", max_retries=0) as sdk:
        chat = sdk.chat.completions.create(model=SEEING, messages=CHAT)
        response = sdk.responses.create(model=SEEING, input=INPUT)
        again = sdk.responses.create(
            model=SEEING, input="and now?", previous_response_id=response.id
        )
    with anthropic.Anthropic(base_url=seeing, api_key="any", max_retries=0) as claude:
        message = claude.messages.create(model=SEEING, max_tokens=50, messages=BLOCKS)
        counted = claude.messages.count_tokens(model=SEEING, messages=BLOCKS)
    assert chat.choices[0].message.content == SAID
    assert response.output_text == SAID
    assert [x.text for x in message.content if x.type == "text"] == [SAID]
    assert chat.usage is not None and response.usage is not None and again.usage is not None
    assert chat.usage.prompt_tokens == response.usage.input_tokens == counted.input_tokens == 4
    # What was stored has the image, too: the turn after it goes on from it.
    assert again.usage.input_tokens_details.cached_tokens >= 4
