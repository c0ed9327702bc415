"""Grammars are tried out in a process that can be ended, for one tenant after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil
import pytest

from engines.host.grammar import GrammarWish
from engines.host.grammar_trial import PROGRAM
from engines.host.tenant_line import Payer
from engines.mlx_worker.grammar.compiler import GrammarCompiler
from engines.mlx_worker.model.vocabulary import Vocabulary
from engines.openai.requests import InvalidRequest

pytestmark = pytest.mark.mlx

ANY, OTHER = Payer("any"), Payer("other")
SMALL = {"type": "object", "properties": {"a": {"type": "integer"}}}
# An automaton of a hundred million states: minutes and gigabytes, despite llguidance's limits.
ENDLESS = {"type": "integer", "multipleOf": 99_999_989}


@asynccontextmanager
async def compiling(vocabulary: Vocabulary) -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary)
    try:
        yield compiler
    finally:
        await compiler.close()


def wish(schema: dict[str, Any]) -> GrammarWish:
    return GrammarWish([], False, schema)


async def trial_of(compiler: GrammarCompiler) -> psutil.Process:
    """The process that tries grammars out, once there is one."""
    while not compiler.trials.num_begun or not (trials := _trials()):
        await asyncio.sleep(0.01)
    return trials[-1]


def _trials() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended: a zombie, or gone
            if PROGRAM in child.cmdline():
                found.append(child)
    return found


async def test_a_grammar_is_compiled_once_for_a_tenant(plain: Vocabulary) -> None:
    async with compiling(plain) as compiler:
        grammar = await compiler.of(ANY, wish(SMALL))
        assert await compiler.of(ANY, wish(SMALL)) is grammar
        assert await compiler.of(OTHER, wish(SMALL)) is not grammar
        assert compiler.trials.num_begun == 1


async def test_a_grammar_that_takes_too_much_is_refused_and_others_go_on(plain: Vocabulary) -> None:
    async with compiling(plain) as compiler:
        await compiler.of(ANY, wish(SMALL))
        with pytest.raises(InvalidRequest) as refusal:
            await compiler.of(ANY, wish(ENDLESS))
        assert refusal.value.param == "response_format" and "it takes too" in refusal.value.message
        assert await compiler.of(OTHER, wish(SMALL))
        assert compiler.trials.num_begun == 2
        with pytest.raises(InvalidRequest):  # without another trial
            await compiler.of(ANY, wish(ENDLESS))
        assert compiler.trials.num_begun == 2


async def test_a_schema_that_is_wrong_is_named(plain: Vocabulary) -> None:
    async with compiling(plain) as compiler:
        with pytest.raises(InvalidRequest, match="cannot be enforced") as refusal:
            await compiler.of(ANY, wish({"type": "nope"}))
    assert refusal.value.param == "response_format"


async def test_a_client_that_leaves_ends_the_trial(plain: Vocabulary) -> None:
    async with compiling(plain) as compiler:
        await compiler.of(ANY, wish(SMALL))
        trial = await trial_of(compiler)
        work_s = sum(trial.cpu_times()[:2])
        trial.suspend()
        leaving = asyncio.create_task(compiler.of(ANY, wish(ENDLESS)))
        while sum(trial.cpu_times()[:2]) - work_s < 0.05:  # else it ends itself after 1 s
            trial.resume()
            await asyncio.sleep(0.01)
            trial.suspend()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert not trial.is_running()
        assert await compiler.of(OTHER, wish(SMALL))


async def test_a_process_that_was_killed_is_replaced(plain: Vocabulary) -> None:
    async with compiling(plain) as compiler:
        await compiler.of(ANY, wish(SMALL))
        trial = await trial_of(compiler)
        trial.kill()
        while trial.is_running():
            await asyncio.sleep(0.01)
        assert await compiler.of(ANY, wish(SMALL | {"title": "another"}))
        assert compiler.trials.num_begun == 2


async def test_one_tenants_many_do_not_keep_anothers_one(plain: Vocabulary) -> None:
    order: list[str] = []

    async def take(payer: Payer, number: int) -> None:
        await compiler.of(payer, wish(SMALL | {"title": f"{number}"}))
        order.append(payer.tenant)

    async with compiling(plain) as compiler:
        await compiler.of(ANY, wish(SMALL))
        many = [asyncio.create_task(take(ANY, i)) for i in range(20)]
        while not order:
            await asyncio.sleep(0.001)
        await asyncio.gather(*many, take(OTHER, 99))
    assert order.index("other") < 6


async def test_the_number_of_known_grammars_is_bounded(plain: Vocabulary) -> None:
    async with compiling(plain) as compiler:
        kept = await compiler.of(OTHER, wish(SMALL))
        for i in range(80):
            await compiler.of(ANY, wish(SMALL | {"title": str(i)}))
        assert await compiler.of(OTHER, wish(SMALL)) is kept
        assert len(compiler.known) == 64
