"""What takes long does not happen on the event loop, where all streams would wait for it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engines.mlx_worker import http
from engines.openai.requests import ChatRequest, read_chat
from tests.integration.worker_http.stage import HELLO, post

pytestmark = pytest.mark.mlx


BODIES = [(HELLO, 200, False)]
LARGE = "x" * (http.LARGE_BODY_BYTES + 1)
# More than the context holds, and no role.
BODIES += [([{"role": role, "content": LARGE}], 400, True) for role in ("user", 5)]


@pytest.mark.parametrize(("messages", "status", "elsewhere"), BODIES, ids=["small", "large", "odd"])
async def test_large_bodies_are_parsed_beside_the_loop(
    toy, monkeypatch, messages, status, elsewhere
):
    threads: list[int] = []

    def parse(body: bytes) -> ChatRequest:
        threads.append(threading.get_ident())
        return read_chat(body)

    monkeypatch.setattr(http, "read_chat", parse)
    body = {"model": "toy", "messages": messages, "max_tokens": 1}
    async with toy() as stage, post(stage, body) as response:
        assert response.status == status
        if status == 400:
            assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert [x != threading.get_ident() for x in threads] == [elsewhere]


async def test_echoed_tokens_are_written_out_beside_the_loop(toy, monkeypatch):
    prompt, threads = [70, 71, 72], list[int]()

    def decode(self: TokenizerWrapper, ids: Any, **how: Any) -> str:
        if ids == prompt:
            threads.append(threading.get_ident())
        return str(self._tokenizer.decode(ids, **how))

    monkeypatch.setattr(TokenizerWrapper, "decode", decode, raising=False)
    async with toy() as stage:
        stage.script("ok")
        reply = await stage.client.completions.create(model="toy", prompt=prompt, echo=True)
        assert reply.choices[0].text == stage.tokenizer._tokenizer.decode(prompt) + "ok"
    assert threads and threading.get_ident() not in threads
