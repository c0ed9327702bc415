"""The real gateway with the fake engine, and OpenAI's own client of it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from benchmarks.stacks.fake_stack import FakeStack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    with FakeStack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: FakeStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="any", max_retries=0) as sdk:
        yield sdk
