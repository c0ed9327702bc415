"""The line of texts to be embedded: whose turn it is, and that turns are never lost."""

from __future__ import annotations

import asyncio
import random

from engines.host.tenant_line import Payer, TenantLine


async def take(line: TenantLine, payer: Payer, num_texts: int, order: list[str]) -> None:
    with line.place(payer):
        for _ in range(num_texts):
            async with line.turn(payer, 10):
                order.append(payer.tenant)
                await asyncio.sleep(0)


async def test_tenants_take_turns_by_their_weight() -> None:
    line, order = TenantLine(64), list[str]()
    requests = [take(line, Payer("many"), 10, order) for _ in range(20)]
    requests += [take(line, Payer("heavy", 3), 10, order) for _ in range(3)]
    await asyncio.gather(*requests, take(line, Payer("one"), 10, order))
    assert len(order) == 240
    early = order[:50]
    assert abs(early.count("one") - 10) <= 2 and abs(early.count("heavy") - 30) <= 3


async def test_turns_are_never_lost_however_clients_leave() -> None:
    chance, line, order = random.Random(7), TenantLine(64), list[str]()
    for _ in range(50):
        tasks = [asyncio.create_task(take(line, Payer(f"t{i % 3}"), 5, order)) for i in range(12)]
        for task in chance.sample(tasks, 8):
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
    order.clear()
    async with asyncio.timeout(5):
        await take(line, Payer("last"), 2, order)
    assert order == ["last"] * 2
