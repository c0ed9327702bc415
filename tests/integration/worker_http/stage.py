"""The worker's HTTP side on a real port, over a toy owner, and clients for it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import openai
import uvicorn
from openai import AsyncOpenAI

from engines.config import EngineConfig
from engines.mlx_worker.embeddings import Embedder
from engines.mlx_worker.http import create_app
from engines.mlx_worker.owner import Owner
from tests.integration.tiny_models import tiny_model
from tests.reports import worker_config
from tests.toy_owner import saying

LOGITS = 410
TOKEN = "secret"
HELLO: Any = [{"role": "user", "content": "Hello, how are you?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": CITY}}
CALL = '{"name": "look", "arguments": {"city": "Paris"}}'


class Stage:
    """A served app with a toy owner, and clients for it."""

    def __init__(self, url: str, owner: Any, tokenizer: Any) -> None:
        self.url = url
        self.owner = owner
        self.tokenizer = tokenizer
        # Without TLS there is no need to load certificates, which takes most of a second.
        http = openai.DefaultAsyncHttpxClient(verify=False)
        self.client = AsyncOpenAI(
            base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, http_client=http
        )

    def script(self, text: str) -> None:
        end = self.tokenizer.eos_token_id
        self.owner.script = saying([*self.tokenizer.encode(text, add_special_tokens=False), end])

    async def chat(self, **fields: Any) -> Any:
        asked = {"model": "toy", "messages": HELLO, **fields}
        return await self.client.chat.completions.create(**asked)

    async def chunks(self, **fields: Any) -> list[Any]:
        return [chunk async for chunk in await self.chat(stream=True, **fields)]


@asynccontextmanager
async def started_owner(max_batch: int, kind: str = "llama") -> AsyncIterator[Owner]:
    """The real owner thread of a tiny model."""
    owner = Owner(lambda: tiny_model(kind), EngineConfig(max_batch=max_batch), "toy")
    await owner.start()
    try:
        yield owner
    finally:
        await owner.close()


@asynccontextmanager
async def staged(
    owner: Owner, tokenizer: Any, keepalive_s: float = 5.0, embedder: Embedder | None = None
) -> AsyncIterator[Stage]:
    config = worker_config(model_path="toy", served_model_name="toy", token=TOKEN)
    app = create_app(owner, tokenizer, config, keepalive_s, embedder)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([port]))
        while not server.started:
            await asyncio.sleep(0.01)
        stage = Stage(f"http://127.0.0.1:{port.getsockname()[1]}", owner, tokenizer)
        try:
            yield stage
        finally:
            await stage.client.close()
            server.should_exit = True
            await serving


Open = Callable[..., AbstractAsyncContextManager[Stage]]


def post(stage: Stage, body: dict[str, Any], **headers: str) -> Any:
    """POST a chat without OpenAI's client."""

    @asynccontextmanager
    async def conversation() -> AsyncIterator[aiohttp.ClientResponse]:
        bearer = {"authorization": f"Bearer {TOKEN}", **headers}
        url = f"{stage.url}/v1/chat/completions"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json=body, headers=bearer) as response,
        ):
            yield response

    return conversation()


def asking(stage: Stage, **fields: Any) -> asyncio.Task[bytes]:
    """Ask for a chat that does not end by itself, and read all of its answer."""
    body = {"model": "toy", "messages": HELLO, "ignore_eos": True, **fields}

    async def ask() -> bytes:
        async with post(stage, body) as response:
            return bytes(await response.read())

    return asyncio.create_task(ask())
