"""A real owner thread around a small random model, and short ways to talk to it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from benchmarks.stacks.constants import configured
from engines.config import EngineConfig
from engines.http import CacheOutcome
from engines.mlx_worker.control import MlxVerbs, SessionReports
from engines.mlx_worker.generation import (
    EventQueue,
    Failed,
    Finished,
    FinishReason,
    Generation,
    PromptAdmitted,
    SequenceSampling,
    Token,
)
from engines.mlx_worker.owner import Owner
from engines.mlx_worker.sessions.store_opening import store_opener, tiers_of_settings
from kvstore.config import StoreConfig
from kvstore.session import CHUNK_TOKENS, SessionRef
from kvstore.shapes import KVRun
from kvstore.store.cold_store import ColdStore
from kvstore.store.restorer import Match, Restored
from kvstore.tiers.base import Tier
from tests.integration.tiny_models import tiny_model

GREEDY = (SequenceSampling(),)
# For tests that are not about a codec's loss.
ANY_CODEC: Mapping[str, Any] = {"accept_loss": True}


def session(name: str, tenant: str = "tenant") -> SessionRef:
    return SessionRef(tenant, name, tenant.encode().ljust(32, b"."))


def whole(num_tokens: int) -> int:
    """Count the tokens of these in full chunks."""
    return num_tokens // CHUNK_TOKENS * CHUNK_TOKENS


def text(start: int, num_tokens: int) -> list[int]:
    """A prompt that shares no beginning with one of another ``start``."""
    return [(start * 31 + i * i + 7 * i) % 489 + 10 for i in range(num_tokens)]


@dataclass
class Answer:
    """Everything that came out of one turn."""

    cache: CacheOutcome | None = None
    tokens: list[int] = field(default_factory=list)  # of row 0
    logprobs: list[float] = field(default_factory=list)  # of row 0
    rows: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    failed: str = ""


async def begun(stream: EventQueue) -> asyncio.Task[Answer]:
    """The reading of an answer whose first token is there, or that ended without one."""
    first = asyncio.Event()
    reading = asyncio.create_task(read(stream, first))
    reading.add_done_callback(lambda _: first.set())
    await first.wait()
    return reading


async def read(stream: EventQueue, first: asyncio.Event | None = None) -> Answer:
    """``first`` is set at the first token."""
    answer = Answer()
    async for event in stream.events():
        if first is not None and isinstance(event, Token):
            first.set()
        match event:
            case PromptAdmitted(cache):
                answer.cache = cache
            case Token(row, token, logprob):
                answer.rows.setdefault(row, []).append(token)
                if row == 0 and logprob is not None:
                    answer.logprobs.append(logprob)
            case Finished(row, reason):
                answer.finished[row] = reason
            case Failed(message):
                answer.failed = message
    answer.tokens = answer.rows.get(0, [])
    return answer


class Engine:
    def __init__(self, owner: Owner, tiers: Sequence[Tier] = ()) -> None:
        self.owner = owner
        self.tiers = tiers  # of its store, fastest first
        self.reports = SessionReports(owner)
        self.verbs = MlxVerbs(owner, self.reports)

    @property
    def store(self) -> ColdStore:
        assert self.owner.store is not None
        return self.owner.store

    def submit(
        self,
        prompt: Sequence[int],
        ref: SessionRef | None = None,
        *,
        max_tokens: int = 8,
        sampling: Sequence[SequenceSampling] = GREEDY,
        stop: Sequence[tuple[int, ...]] = (),
        boundaries: Sequence[int] = (),
    ) -> EventQueue:
        generation = Generation(
            list(prompt), sampling, max_tokens, stop, ref, boundaries, top_logprobs=0
        )
        return self.owner.submit(generation)

    async def turn(self, prompt: Sequence[int], ref: SessionRef | None = None, **how) -> Answer:  # type: ignore[no-untyped-def]
        return await read(self.submit(prompt, ref, **how))

    async def asleep_after(
        self, prompt: Sequence[int], ref: SessionRef | None = None, **how: Any
    ) -> Answer:
        """Take a turn, then put all sessions to sleep."""
        answer = await self.turn(prompt, ref, **how)
        await self.settled()
        await self.demote_all()
        return answer

    async def settled(self) -> None:
        """All turns have ended and all saves are through."""
        await self.owner.call(lambda: None)
        assert await asyncio.to_thread(self.store.flush, 20.0)
        await self.owner.call(lambda: None)

    async def demote_all(self) -> None:
        for report in self.reports.sessions():
            done = await self.verbs.demote(session(report.id, report.tenant), None)
            assert done.kept is None, done


@asynccontextmanager
async def engine(
    kind: str,
    folder: Path | None = None,
    *,
    codec: str = "raw",
    gate: Mapping[str, Any] = ANY_CODEC,
    **config: int | str,
) -> AsyncIterator[Engine]:
    """A started engine around a tiny model, closed at the end.

    Args:
        folder: of the disk tier; None = no cold store at all.
        gate: the store's settings of a codec's least quality, and any others.
    """
    gc.collect()  # leftovers of earlier engines: MLX counts memory by process
    settings = EngineConfig(**{"prefill_step": 64, **config})  # type: ignore[arg-type]
    name, tiers = f"tiny-{kind}", list[Tier]()
    if folder is None:
        owner = Owner(lambda: tiny_model(kind), settings, name)
    else:
        store = configured(
            StoreConfig,
            codec=codec,
            **gate,
            disk_path=str(folder),
            disk_bytes=256 << 20,
            num_threads=2,
        )

        def opened(config: StoreConfig) -> list[Tier]:
            tiers.extend(tiers_of_settings(config))
            return tiers

        opener = store_opener(store, name, tiers_of=opened)
        owner = Owner(lambda: tiny_model(kind), settings, name, opener)
    await owner.start()
    try:
        yield Engine(owner, tiers)
    finally:
        await owner.close()
        if owner.store is not None:
            await asyncio.to_thread(owner.store.close)


class Around:
    """The store of an engine, but for the methods that a test puts in its place."""

    def __init__(self, store: ColdStore, **replaced: Callable[..., Any]) -> None:
        self._store = store
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._store, name)


def hold_restores(it: Engine) -> tuple[threading.Event, threading.Event]:
    """Hold each restore, once it has read, until the second event; the first says it has."""
    reading, go_on, store = threading.Event(), threading.Event(), it.store

    def restore(match: Match, out: KVRun) -> Restored:
        restored = store.restore(match, out=out)
        reading.set()
        assert go_on.wait(30)
        return restored

    surround(it, restore=restore)
    return reading, go_on


def surround(it: Engine, **replaced: Callable[..., Any]) -> None:
    """Let the owner thread and the restores go through these methods from now on."""
    cold = it.owner.batching.cold
    cold.store = cast(ColdStore, Around(it.store, **replaced))
