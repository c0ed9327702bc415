"""Many sessions on one engine, asleep and awake at random, or all back at once: the same tokens."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from engines.config import SPARE_PLACE
from engines.host.work_line import QueueFull
from kvstore.session import CHUNK_TOKENS
from kvstore.store.restorer import Match, Restored
from tests.integration.mlx_owner.harness import Answer, Engine, engine, session, surround, text

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TURNS = 5
AT_ONCE = 6
PLACES, FEW_PLACES = 4, 2
SHARED = text(9000, 128)  # a system prompt: one whole chunk
TOKENS = 6


def soak(usual: int, thorough: int) -> pytest.MarkDecorator:
    counts = [usual, pytest.param(thorough, marks=pytest.mark.thorough)]
    return pytest.mark.parametrize("many", counts)


def question(chat: int, turn: int) -> list[int]:
    """What a user adds: of any length, a single token among them."""
    length = random.Random(f"{chat} {turn}").choice((1, 2, 7, 40, 127, 128, 129, 200))
    return text(chat * NUM_TURNS + turn, length)


def beginning(chat: int) -> list[int]:
    """Every other chat has the same system prompt."""
    return SHARED if chat % 2 else []


async def without_a_cache(chats: int, turns: int) -> list[list[list[int]]]:
    """The answers that each chat gets, turn by turn, from an engine that keeps nothing."""
    async with engine("llama", None, max_batch=PLACES, hot_bytes=128 << 20) as it:

        async def one(chat: int) -> list[list[int]]:
            history, answers = beginning(chat), []
            for turn in range(turns):
                history = history + question(chat, turn)
                answers.append((await it.turn(history, max_tokens=TOKENS)).tokens)
                history = history + answers[-1]
            return answers

        found = []
        for first in range(0, chats, PLACES):
            some = range(first, min(chats, first + PLACES))
            found += await asyncio.gather(*(one(chat) for chat in some))
        return found


def prompt_of(chat: int, turn: int, answers: Sequence[Sequence[int]]) -> list[int]:
    prompt = beginning(chat)
    for earlier in range(turn):
        prompt = [*prompt, *question(chat, earlier), *answers[earlier]]
    return prompt + question(chat, turn)


@soak(6, 100)
async def test_chats_of_five_turns_that_sleep_and_wake_at_random(many: int, tmp_path: Path) -> None:
    right = await without_a_cache(many, NUM_TURNS)
    chance = random.Random(4)
    sources: Counter[str] = Counter()
    async with engine(
        "llama", tmp_path, max_batch=PLACES, hot_bytes=(12 << 20) + (many << 17)
    ) as it:
        names = [session(f"chat {i}", f"tenant {i % 3}") for i in range(many)]
        for turn in range(NUM_TURNS):
            order = chance.sample(range(many), many)
            for first in range(0, many, AT_ONCE):
                some = order[first : first + AT_ONCE]
                prompts = [prompt_of(chat, turn, right[chat]) for chat in some]
                turns = (
                    it.turn(prompt, names[chat], max_tokens=TOKENS)
                    for chat, prompt in zip(some, prompts, strict=True)
                )
                for chat, answer in zip(some, await asyncio.gather(*turns), strict=True):
                    assert answer.tokens == right[chat][turn], (chat, turn, answer.cache)
                    sources[answer.cache.source] += 1
                await disturb(it, chance, names[chance.choice(some)])
                await disturb(it, chance, names[chance.randrange(many)])
        assert "corrupt" not in it.store.stats().counters
    assert sum(sources.values()) == many * NUM_TURNS
    assert sources["cold-ram"] + sources["cold-disk"] > many
    assert sources["hot"] > many // 3 and sources["miss"] >= many // 2


async def disturb(it: Engine, chance: random.Random, ref: object) -> None:
    """Send a session to sleep, to the disk perhaps, wake it early, or forget it."""
    match chance.randrange(8):
        case 0 | 1 | 2:
            await it.verbs.demote(ref, None)  # type: ignore[arg-type]
        case 3 | 4:
            await it.verbs.demote(ref, "disk")  # type: ignore[arg-type]
        case 5:
            await it.verbs.prefetch(ref)  # type: ignore[arg-type]
        case 6:
            await it.verbs.forget(ref)  # type: ignore[arg-type]


@soak(40, 200)
async def test_many_sessions_that_return_at_once(many: int, tmp_path: Path) -> None:
    """Few are restored at a time, and all are right."""
    right = await without_a_cache(many, 2)
    restoring, most, lock = 0, 0, threading.Lock()
    refused = Counter[int]()
    async with engine("llama", tmp_path, max_batch=FEW_PLACES, hot_bytes=64 << 20) as it:
        names = [session(f"chat {i}", "many") for i in range(many)]
        for first in range(0, many, FEW_PLACES):
            some = range(first, min(many, first + FEW_PLACES))
            await asyncio.gather(
                *(it.turn(prompt_of(i, 0, right[i]), names[i], max_tokens=TOKENS) for i in some)
            )
        await it.settled()
        for name in names:  # those of fewer tokens than a chunk stay hot
            await it.verbs.demote(name, None)
        restore = it.store.restore

        def counted(match: Match, *rest: object, **more: object) -> Restored:
            nonlocal restoring, most
            with lock:
                restoring += 1
                most = max(most, restoring)
            try:
                return restore(match, *rest, **more)  # type: ignore[arg-type]
            finally:
                with lock:
                    restoring -= 1

        surround(it, restore=counted)

        async def back(chat: int) -> Answer:
            prompt = prompt_of(chat, 1, right[chat])
            while True:
                try:
                    return await it.turn(prompt, names[chat], max_tokens=TOKENS)
                except QueueFull:  # 429: as a client, it comes again
                    refused[chat] += 1
                    await asyncio.sleep(0.05)

        answers = await asyncio.gather(*map(back, range(many)))
    assert refused  # the line is bounded, too
    sources = Counter[str]()
    for chat, answer in enumerate(answers):
        assert answer.tokens == right[chat][1], chat
        sources[answer.cache.source] += 1
    # What one has restored of the common system prompt is hot for those after it.
    short = sum(len(prompt_of(i, 0, right[i])) + TOKENS <= CHUNK_TOKENS for i in range(many))
    assert sources["miss"] <= short  # those without a full chunk are not stored
    assert sources["cold-ram"] > many // 2
    assert 1 <= most <= FEW_PLACES + SPARE_PLACE
