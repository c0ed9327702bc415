"""Memory of models that are not loaded is lent, and taken back before they are."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import EngineUnavailable
from gateway.models.lending import NOTHING, Budget, Lending, Part, loans, total
from tests.unit.gateway.in_process import WELCOME, RecordingEngine

BUDGETS = st.builds(Budget, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
SHARES = st.dictionaries(st.text(max_size=3), st.integers(1, 1000), max_size=5)
pytestmark = pytest.mark.timeout(60)
MACHINE, OWN = Budget(100, 40), Budget(50, 20)


@given(BUDGETS, st.lists(BUDGETS, max_size=4), SHARES)
def test_loans_and_guarantees_fit_together(machine, guaranteed, shares):
    found = loans(machine, guaranteed, shares)
    assert set(found) == set(shares)
    lent, taken = total(found.values()), total(guaranteed)
    assert lent.hot <= max(0, machine.hot - taken.hot)
    assert lent.ram <= max(0, machine.ram - taken.ram)


def test_free_memory_is_lent_by_share():
    found = loans(Budget(100, 50), [Budget(30, 20), Budget(10, 0)], {"a": 1, "b": 2})
    assert found == {"a": Budget(20, 10), "b": Budget(40, 20)}
    assert loans(Budget(10, 10), [Budget(10, 20)], {"a": 1}) == {"a": NOTHING}
    assert loans(Budget(10, 10), [], {}) == {}


def test_budgets_compare_by_each_kind_of_memory():
    assert Budget(1, 2).fits(Budget(1, 3))
    assert not Budget(2, 0).fits(Budget(1, 3))
    assert Budget(2, 0).within(Budget(1, 3)) == Budget(1, 0)
    assert total([]) == NOTHING


class Elastic(RecordingEngine):
    """Uses all of its last budget, from when it hears of more until it says that it has less."""

    def __init__(self) -> None:
        super().__init__(welcome=None)
        self.gave_up = False
        self.uses = NOTHING
        self.fails: list[str] = []  # "before" or "after" it has obeyed, one for each call
        self.begin()

    def begin(self) -> None:
        self.welcome = msgspec.structs.replace(WELCOME, moves_budgets=True)
        self.uses = OWN

    def die(self) -> None:
        self.welcome, self.uses = None, NOTHING

    async def set_budgets(self, hot_bytes: int, ram_bytes: int) -> None:
        await asyncio.sleep(0)
        how = self.fails.pop(0) if self.fails else ""
        if how != "before":
            self.uses = Budget(hot_bytes, ram_bytes)
        if how:
            raise EngineUnavailable("the connection was lost")


def two_models() -> tuple[Lending, Elastic, Elastic, dict[str, Part]]:
    always, sometimes = Elastic(), Elastic()
    sometimes.die()
    parts = {"a": Part(always, OWN, 1, True), "b": Part(sometimes, OWN, 1, False)}
    return Lending(MACHINE, parts), always, sometimes, parts


async def test_memory_that_a_model_does_not_need_is_lent_and_taken_back():
    lending, always, sometimes, _ = two_models()
    await lending.look()
    assert always.uses == MACHINE
    await lending.take_back("b")
    assert (always.uses, lending.most_in_use) == (OWN, MACHINE)
    sometimes.begin()
    await lending.look()
    assert (always.uses, sometimes.uses) == (OWN, OWN)
    sometimes.die()
    lending.left("b")
    await lending.look()
    assert always.uses == MACHINE


async def test_a_model_waits_until_its_memory_is_given_back():
    lending, always, _, _ = two_models()
    await lending.look()
    always.fails = ["before", "before", "after"]
    await lending.take_back("b")
    assert always.uses == OWN
    assert always.fails == []


async def test_an_engine_that_died_is_asked_again_and_counts_meanwhile():
    lending, always, _, parts = two_models()
    always.fails = ["after"]  # it has more, and the answer was lost
    await lending.look()
    assert parts["a"].lent == Budget(50, 20)
    always.die()
    waiting = asyncio.create_task(lending.take_back("b"))
    await asyncio.sleep(0.5)
    assert not waiting.done()  # it may still run
    always.begin()
    await waiting
    assert (parts["a"].lent, always.uses) == (NOTHING, OWN)


async def test_one_that_gave_up_has_nothing():
    lending, always, _, parts = two_models()
    await lending.look()
    always.die()
    always.gave_up = True
    await lending.take_back("b")
    assert parts["a"].lent == NOTHING


async def test_engines_that_cannot_change_are_left_alone():
    lending, always, _, _ = two_models()
    always.welcome = msgspec.structs.replace(WELCOME, moves_budgets=False)
    await lending.look()
    assert always.uses == OWN
    await lending.take_back("unknown")
    lending.left("unknown")


@pytest.mark.parametrize("seed", range(20))
async def test_no_order_of_events_uses_more_than_there_is(seed):
    chance = random.Random(seed)
    engines = {name: Elastic() for name in "abc"}
    for name in "bc":
        engines[name].die()
    parts = {name: Part(x, OWN, 1, name == "a") for name, x in engines.items()}
    lending = Lending(MACHINE, parts)  # for two of them at once
    loaded: list[str] = []

    def check() -> None:
        hot, ram = (sum(x.uses[i] for x in engines.values()) for i in (0, 1))
        assert Budget(hot, ram).fits(MACHINE)

    for _ in range(60):
        action = chance.choice(["look", "load", "unload", "die", "fail"])
        if action == "look":
            await lending.look()
        elif action == "load" and not loaded:
            name = chance.choice("bc")
            taking = asyncio.create_task(lending.take_back(name))
            while not taking.done():
                check()
                if engines["a"].welcome is None and chance.random() < 0.3:
                    engines["a"].begin()
                await asyncio.sleep(0.01)
            engines[name].begin()
            loaded.append(name)
        elif action == "unload" and loaded:
            name = loaded.pop()
            engines[name].die()
            lending.left(name)
        elif action == "die":
            engine = engines[chance.choice(["a", *loaded])]
            engine.die()
            await lending.look()
            check()
            engine.begin()
        elif action == "fail":
            engines["a"].fails += chance.choices(["before", "after", ""], k=2)
        check()
