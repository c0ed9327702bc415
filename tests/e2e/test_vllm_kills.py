"""kill -9 of each of vLLM's processes while four users chat: errors that a client understands, an
engine that comes back, sessions that wake from disk, and nothing left of the dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import psutil
import pytest

from benchmarks.stacks.product_stack import Client, Stack, client_of, prose
from tests.waiting import eventually, is_gone

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1500)]

USERS = 4
AWAY_S = 600.0  # the time a busy machine may take to start vLLM
VICTIMS = {
    "worker": "VLLM::Worker",
    "engine core": "VLLM::EngineCore",
    "HTTP server": "engines.vllm_plugin.process.server",
    "starter": "-m engines.vllm_plugin",  # the first of the family
}


class User:
    """Chats without end, by streams or by whole answers, through OpenAI's own client."""

    def __init__(self, sdk: openai.AsyncOpenAI, model: str, number: int) -> None:
        self._sdk = sdk
        self._model = model
        self._number = number
        self.num_pieces = 0
        self.num_answers = 0
        self.errors: list[openai.APIError] = []

    async def chat(self) -> None:
        while True:
            try:
                await self._turn()
            except openai.APIConnectionError:
                raise  # the gateway itself has nothing to excuse
            except openai.APIError as error:
                self.errors.append(error)
                await asyncio.sleep(0.2)
            else:
                self.num_answers += 1

    async def _turn(self) -> None:
        text = f"Story {self._number}-{self.num_answers}: {prose(self._number, 40)}? Go on."
        answer = await self._sdk.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": text}],
            max_tokens=48,
            stream=bool(self._number % 2),
            extra_headers={"X-Session-ID": f"user-{self._number}"},
            extra_body={"ignore_eos": True},
        )
        if isinstance(answer, openai.AsyncStream):
            async for _ in answer:
                self.num_pieces += 1


@asynccontextmanager
async def load(stack: Stack, model: str) -> AsyncIterator[list[User]]:
    """Some turns are under way when this begins."""
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as sdk:
        users = [User(sdk, model, i) for i in range(USERS)]
        tasks = [asyncio.create_task(x.chat()) for x in users]
        try:
            await eventually(lambda: all(x.num_pieces or x.num_answers for x in users))
            pieces = [x.num_pieces for x in users]
            await eventually(
                lambda: any(x.num_pieces > n for x, n in zip(users, pieces, strict=True))
            )
            yield users
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(x, asyncio.CancelledError) for x in ended), ended


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    paths = {x.path for process in processes for x in process.memory_maps()}
    return {Path(x) for x in paths if x.startswith("/dev/shm/psm_")}


def question(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{name}: {prose(name, 300)}? Tell me more."}]


async def sleep_on_disk(client: Client, name: str) -> str:
    answer = await client.chat(question(name), session=name)
    await client.until(name, "idle")
    await client.post(f"/v1/sessions/{name}/demote", {"tier": "disk"})
    await client.until(name, "cold")
    return answer.text


def check_errors(users: list[User]) -> None:
    """Check the errors that users got, if any: a turn without any output is sent once more."""
    for error in [x for user in users for x in user.errors]:
        assert error.message and error.type, repr(error)
        if isinstance(error, openai.APIStatusError):
            assert error.status_code in (502, 503, 504), repr(error)


@pytest.mark.parametrize(
    "victim",
    [x if x == "engine core" else pytest.param(x, marks=pytest.mark.thorough) for x in VICTIMS],
)
async def test_kill_9_under_load(vllm_stack: Stack, victim: str) -> None:
    name = victim.replace(" ", "-")
    async with client_of(vllm_stack) as client:
        right = await sleep_on_disk(client, name)
        engine = vllm_stack.engine
        family = [engine, *engine.children(recursive=True)]
        memory = shared_memory(family)
        assert memory
        async with load(vllm_stack, client.model) as users:
            next(x for x in family if VICTIMS[victim] in " ".join(x.cmdline())).kill()
            await asyncio.to_thread(vllm_stack.wait_restarted, engine, AWAY_S)
            answers = [x.num_answers for x in users]
            await eventually(
                lambda: all(x.num_answers > n for x, n in zip(users, answers, strict=True))
            )
        check_errors(users)
        assert [x for x in family if not is_gone(x)] == []
        assert [x for x in memory if x.exists()] == []
        back = await client.chat(question(name), session=name)
    assert (back.text, back.cache.split(";")[0]) == (right, "cold-disk")
    assert back.cached_tokens >= 300 // 32 * 32


async def test_nothing_outlives_gateway_and_starter(vllm_stack: Stack) -> None:
    """The last test: the stack is dead after it."""
    family = vllm_stack.gateway.children(recursive=True)
    await asyncio.to_thread(vllm_stack.kill, engine_too=True)
    await eventually(lambda: all(map(is_gone, family)))
