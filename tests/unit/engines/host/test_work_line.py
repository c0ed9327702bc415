from __future__ import annotations

import asyncio
import random

import pytest

from engines.host.work_line import QueueFull, WorkLine


async def take(line: WorkLine, name: str, num_pieces: int, order: list[str]) -> None:
    for _ in range(num_pieces):
        async with line.turn():
            order.append(name)
            await asyncio.sleep(0)


async def test_requests_take_turns_with_their_pieces() -> None:
    line, order = WorkLine(64), list[str]()
    many = [take(line, "many", 10, order) for _ in range(5)]
    await asyncio.gather(*many, take(line, "one", 3, order))
    assert order[:18] == [*["many"] * 5, "one"] * 3


async def test_the_line_is_bounded_and_who_leaves_it_makes_room() -> None:
    line, order = WorkLine(2), list[str]()
    async with line.turn():
        waiting = [asyncio.create_task(take(line, x, 1, order)) for x in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            await take(line, "c", 1, order)
        waiting[0].cancel()
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(take(line, "c", 1, order)))
        await asyncio.sleep(0)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["b", "c"]


async def test_no_turn_is_lost_when_clients_leave_at_any_moment() -> None:
    for seed in range(50):
        chance, line, order = random.Random(seed), WorkLine(64), list[str]()
        tasks = [asyncio.create_task(take(line, f"{i}", 5, order)) for i in range(12)]
        for task in chance.sample(tasks, 8):
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            task.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
            await take(line, "last", 2, order)
        assert order[-2:] == ["last", "last"]
