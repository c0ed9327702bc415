"""Sessions of real engines go cold and come back; where texts are compared, of a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.stacks.product_stack import MIB, Stack, client_of, prose
from tests.integration.tiny_models import write_model

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def raw_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of a tiny model with the exact codec, for tests that compare tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    write_model("llama", folder)
    settings = {
        "engine": {"model": str(folder), "hot_bytes": 64 * MIB},
        "store": {"codec": "raw", "ram_bytes": 64 * MIB, "disk_bytes": 64 * MIB},
        "scheduler": {"idle_after_s": 3600.0},
    }
    with Stack(settings) as running:
        yield running


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def sleep_now(client, name: str) -> None:
    await client.until(name, "idle")
    await client.post(f"/v1/sessions/{name}/demote")
    await client.until(name, "cold")


async def conversation(client, name: str, words: int, sleeps: bool) -> list[str]:
    """Two turns; between them the session sleeps, or does not."""
    history, texts = [], []
    for turn in range(2):
        history.append(user(f"{prose(f'{words}-{turn}', words)}? Tell me more."))
        reply = await client.chat(history, session=name, max_tokens=10)
        assert reply.status == 200 and not reply.error
        if turn:
            expected = "cold-ram" if sleeps else "hot"
            assert reply.cache.startswith(expected), reply.cache
            assert reply.cached_tokens > 0.8 * words
        texts.append(reply.text)
        history.append(answer(reply.text))
        if sleeps:
            await sleep_now(client, name)
    return texts


async def test_raw_wakes_to_the_very_same_tokens_also_when_four_wake_at_once(raw_stack):
    async with client_of(raw_stack) as client:
        sizes = [20, 60, 35, 110]
        awake = [await conversation(client, f"awake-{n}", n, False) for n in sizes]
        for n in sizes:  # else the same words would be found hot under the other name
            await client.delete(f"/v1/sessions/awake-{n}")
        slept = await asyncio.gather(*(conversation(client, f"slept-{n}", n, True) for n in sizes))
    assert list(slept) == awake


async def test_an_edited_turn_and_a_fork_are_right(raw_stack):
    async with client_of(raw_stack) as client:
        start = [user(prose("fork", 120)), answer("Yes."), user("Is it cold there?")]
        edited = [*start[:2], user("Is it warm there?")]
        expected = [
            (await client.chat(x, session=f"fresh-{i}", max_tokens=10)).text
            for i, x in enumerate((start, edited))
        ]
        await client.chat(start, session="forked", max_tokens=10)
        both = await asyncio.gather(
            client.chat(start, session="forked", max_tokens=10),
            client.chat(edited, session="forked", max_tokens=10),
        )
        assert [x.text for x in both] == expected
        assert all(x.cached_tokens > 100 for x in both)


async def test_sessions_on_disk_survive_a_restart_of_everything(raw_stack):
    history = [user(prose("restart", 150))]
    async with client_of(raw_stack) as client:
        first = await client.chat(history, session="keeper")
        turn = [*history, answer(first.text), user("And?")]
        undisturbed = await client.chat(turn, session="another")
    assert raw_stack.stop() == 0
    raw_stack.start()
    async with client_of(raw_stack) as client:
        view = await client.until("keeper", "cold", timeout_s=10)
        assert view["tier"] == "disk"
        back = await client.chat(turn, session="keeper")
        assert back.cache.startswith("cold-disk"), back.cache
        assert back.cached_tokens >= 0.95 * view["tokens"]
        assert back.text == undisturbed.text
