"""Budgets that change while the engine runs: more sessions stay hot, and leave again in time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.session import TierName
from kvstore.tenant_bytes import TenantLimits
from tests.integration.mlx_owner.harness import ANY_CODEC, Answer, begun, engine, session, text
from tests.integration.mlx_owner.test_budget import BUDGET, NEW, SESSION

pytestmark = pytest.mark.mlx

MORE = 4 * BUDGET


async def test_a_budget_grows_and_shrinks_while_a_turn_runs(tmp_path: Path) -> None:
    small = {**ANY_CODEC, "ram_bytes": 1 << 20}
    async with engine("llama", tmp_path, gate=small, hot_bytes=BUDGET) as it:
        histories = {f"s{i}": text(i, SESSION) for i in range(8)}

        async def all_turns() -> list[Answer]:
            turns = [await it.turn(x, session(name)) for name, x in histories.items()]
            for name, answer in zip(histories, turns, strict=True):
                histories[name] = histories[name] + answer.tokens + NEW
            await it.settled()
            return turns

        await all_turns()
        assert (await it.verbs.stats()).idle_hot_bytes < BUDGET
        await it.verbs.set_budgets(MORE, 1 << 30)
        await all_turns()
        grown = await it.verbs.stats()
        assert grown.hot_capacity_bytes == MORE
        assert next(x for x in grown.tiers if x.name == "ram").nbytes > 1 << 20
        assert BUDGET < grown.idle_hot_bytes <= MORE
        sources = [x.cache.source for x in await all_turns() if x.cache]
        assert sources == ["hot"] * 8

        long = await begun(it.submit(text(99, SESSION), session("long"), max_tokens=100))
        await it.verbs.set_budgets(BUDGET, 0)  # and no less than at the start
        shrunk = await it.verbs.stats()
        assert shrunk.hot_capacity_bytes == BUDGET
        assert shrunk.hot_bytes <= BUDGET
        (ram,) = [x for x in shrunk.tiers if x.name == "ram"]
        assert ram.nbytes <= ram.capacity_bytes == 1 << 20
        answer = await long
        assert (answer.failed, len(answer.tokens)) == ("", 100)

        last = await all_turns()  # nothing is lost: the disk has the rest
        assert all(x.cache is not None and x.cache.source.startswith("cold") for x in last)
        fresh = await it.turn(text(99, SESSION), max_tokens=100)
        assert answer.tokens == fresh.tokens


async def test_no_budget_is_below_that_of_the_start(tmp_path: Path) -> None:
    async with engine("llama", tmp_path, hot_bytes=BUDGET) as it:
        await it.verbs.set_budgets(1, 1 << 30)
        assert (await it.verbs.stats()).hot_capacity_bytes == BUDGET


async def test_running_turns_go_on_when_their_budget_shrinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.mlx_worker.control.SHRINK_WAIT_S", 0.1)
    async with engine("llama", tmp_path, hot_bytes=BUDGET) as it:
        await it.verbs.set_budgets(MORE, 1 << 30)
        prompts = [text(i, SESSION) for i in range(6)]
        running = await asyncio.gather(
            *(begun(it.submit(x, session(f"r{x[0]}"), max_tokens=100)) for x in prompts)
        )
        holds = False
        while not holds:  # it says that more is in use until the youngest wait in line again
            try:
                await it.verbs.set_budgets(BUDGET, 1 << 30)
                holds = True
            except TimeoutError as error:
                assert "ask again" in str(error)
        assert (await it.verbs.stats()).hot_bytes <= BUDGET
        answers = await asyncio.gather(*running)
        assert [(x.failed, len(x.tokens)) for x in answers] == [("", 100)] * 6


async def test_a_tenant_holds_no_more_cold_bytes_than_it_may(tmp_path: Path) -> None:
    async with engine("llama", tmp_path, gate=ANY_CODEC, hot_bytes=BUDGET) as it:
        for i in range(4):
            await it.turn(text(i, SESSION), session(f"s{i}"))
            await it.settled()
        tenant = session("s0").tenant
        (ram,) = [x for x in (await it.verbs.stats()).tiers if x.name == "ram"]
        limits: dict[TierName, TenantLimits] = {"ram": TenantLimits({tenant: ram.nbytes // 2})}
        held = (await it.verbs.limit_tenants(limits)).tiers["ram"][tenant].held
        assert ram.nbytes // 4 < held <= ram.nbytes // 2
        answer = await it.turn(text(9, SESSION), session("s9"), max_tokens=5)
        await it.settled()
        assert (answer.failed, len(answer.tokens)) == ("", 5)
        use = (await it.verbs.limit_tenants(limits)).tiers["ram"][tenant]
        assert use.held <= ram.nbytes // 2 and use.missed > 0
