"""Sessions that take a turn each, round by round, while servers are killed or restarted.

If a server is gone, a stream breaks or the answer is 503, the user asks again: the next server, if
there are several. Each repetition is counted, and so is each turn that failed in spite of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.stacks.product_stack import Client, Reply, Stack, client_of, words_of

AT_ONCE = 4
ANSWER_TOKENS = 8
TRIES = 120  # for one turn, a second apart


@dataclass
class Rounds:
    """Sessions with their histories and answers, and counts of their turns by outcome."""

    num_sessions: int
    num_tokens: int
    models: Sequence[str] = ("",)  # dealt to the sessions in turn; "" = the server's only one
    texts: dict[str, list[str]] = field(default_factory=dict)
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    asked_again: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    num_answered: int = 0  # turns of this round
    deleted: set[str] = field(default_factory=set)
    found_after_deletion: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histories = {
            f"s{i}": [{"role": "user", "content": words_of(f"user {i}", self.num_tokens)}]
            for i in range(self.num_sessions)
        }

    async def round(self, name: str, clients: Sequence[Client]) -> None:
        """Let each session take a turn, ``AT_ONCE`` at a time, with the next client every round."""
        self.num_answered, turned = 0, len(self.sources)
        self.sources[name] = Counter()
        places = asyncio.Semaphore(AT_ONCE)

        async def turn(i: int, session: str) -> None:
            async with places:
                before = self.asked_again.total()
                reply = await self._answer(clients, i + turned, session, i)
            self.num_answered += 1
            # A repeated turn may find the blobs that its own first try stored.
            self._note(name, session, reply, again=self.asked_again.total() > before)

        await asyncio.gather(*(turn(i, x) for i, x in enumerate(self.histories)))
        print(f"  {name}: {dict(self.sources[name])}", flush=True)

    async def _answer(self, clients: Sequence[Client], first: int, session: str, i: int) -> Reply:
        model, reply = self.models[i % len(self.models)], Reply(0)
        fields: dict[str, Any] = {"model": model} if model else {}
        for attempt in range(TRIES):
            client = clients[(first + attempt) % len(clients)]
            try:
                history = self.histories[session]
                reply = await client.chat(history, session, ANSWER_TOKENS, **fields)
            except aiohttp.ClientError:
                self.asked_again["gateway gone"] += 1
            else:
                broken = reply.status == 200 and not reply.ok
                if reply.ok or not (broken or reply.status == 503):
                    return reply
                self.asked_again["stream broken" if broken else "503"] += 1
            await asyncio.sleep(1.0)
        return reply

    def _note(self, name: str, session: str, reply: Reply, *, again: bool) -> None:
        source = reply.cache.partition(";")[0] or "no header"
        self.sources[name][source] += 1
        if not reply.ok:
            self.failures.append(f"{name}, {session}: {reply.status} {reply.error}")
        if session in self.deleted and source != "miss" and not again:
            self.found_after_deletion.append(f"{name}, {session}: {reply.cache}")
        self.deleted.discard(session)
        self.texts.setdefault(session, []).append(reply.text)
        self.histories[session] += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "And what comes next?"},
        ]

    async def in_the_middle(self, event: Callable[[], object]) -> None:
        """Run ``event`` on a thread once a third of the round's turns is answered."""
        while self.num_answered < self.num_sessions / 3:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(event)

    def other_texts(self, stack: Stack) -> int:
        """Play the same rounds on an undisturbed server; return how many sessions' texts differ."""
        alone = Rounds(self.num_sessions, self.num_tokens, self.models)

        async def all_rounds() -> None:
            async with client_of(stack) as client:
                await until_loaded(client)
                for name in self.sources:
                    await alone.round(name, [client])

        with stack:
            asyncio.run(all_rounds())
        return sum(texts != alone.texts[session] for session, texts in self.texts.items())


async def until_loaded(client: Client) -> None:
    """Wait until all models of a server are loaded."""
    async with asyncio.timeout(900):
        while True:
            models = (await client.get("/v1/models"))["data"]
            if all(x.get("state", "loaded") == "loaded" for x in models):
                return
            await asyncio.sleep(0.5)
