"""Loads models when they are asked for, and unloads them again; their sessions stay.

Models *on demand* take turns in a few places, since a machine's memory holds only so many. A
request for one that is not loaded waits in line. An engine that ends writes all its sessions to the
tiers that outlive it; the next one finds them there, so that a model comes back with its
conversations.

    unloaded --start--> loading --ready--> loaded --stop--> unloading --ended--> unloaded
                           '------failed----------------------^

Belongs to the event loop. ``run`` alone changes which models are loaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from engines.base import Engine, EngineUnavailable, TierName
from scheduler.sessions import SessionManager

log = logging.getLogger("thermocline.gateway")

LOOK_EVERY_S: Final = 0.5
READY_POLL_S: Final = 0.05
RETRY_AFTER_S: Final = 10.0  # a model that could not be loaded is refused for so long
MAX_WAITING: Final = 256  # requests for models that are not loaded


class State(Enum):
    """Says whether a model can be asked."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


_NEXT: Final = {
    State.UNLOADED: (State.LOADING,),
    State.LOADING: (State.LOADED, State.UNLOADING),
    State.LOADED: (State.UNLOADING,),
    State.UNLOADING: (State.UNLOADED,),
}


@dataclass(eq=False)
class OnDemand:
    """One model that is loaded when it is asked for. ``Loading`` is its only writer."""

    name: str
    engine: Engine
    sessions: SessionManager
    unload_after_s: float  # without a request
    load_timeout_s: float
    rests_in: TierName  # the tier that outlives the engine
    state: State = State.UNLOADED
    num_uses: int = 0  # requests that need it loaded
    last_used: float = 0.0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    failed: str = ""  # why it could not be loaded
    failed_at: float = float("-inf")

    def to(self, state: State) -> None:
        """Change the state; the log and readers of events hear of it."""
        assert state in _NEXT[self.state], f"{self.name}: {self.state.value} -> {state.value}"
        log.info("model %s: %s -> %s", self.name, self.state.value, state.value)
        self.state = state


class Loading:
    """Decides which models on demand are loaded, and loads and unloads them one after another."""

    def __init__(
        self,
        models: Sequence[OnDemand],
        places: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            places: the most models that may be loaded at once.
            clock: in seconds; only differences count.
        """
        self._models = list(models)
        self._places = places
        self._clock = clock
        self._wanted: list[OnDemand] = []  # in the order in which they were asked for
        self._changed = asyncio.Event()
        self._ended = False

    async def enter(self, model: OnDemand) -> None:
        """Wait until a model is loaded; it stays so until ``leave`` has been called as often.

        Raises:
            EngineUnavailable: it cannot be loaded, or too many requests wait already.
        """
        if self._ended:
            raise EngineUnavailable("the server is shutting down")
        if self._clock() - model.failed_at < RETRY_AFTER_S:
            raise EngineUnavailable(model.failed)
        if not self._takes(model):
            if sum(len(x.waiting) for x in self._models) >= MAX_WAITING:
                raise EngineUnavailable(f"too many requests wait for models; {model.name} is one")
            await self._wait(model)
        else:
            model.num_uses += 1
        model.last_used = self._clock()

    def leave(self, model: OnDemand) -> None:
        """End a use of a model."""
        model.num_uses -= 1
        model.last_used = self._clock()
        self._changed.set()

    def _takes(self, model: OnDemand) -> bool:
        """Tell whether requests may have the model now: others in line may have its place next."""
        return model.state is State.LOADED and model is not self._leaving()

    async def _wait(self, model: OnDemand) -> None:
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(loaded)
        if model not in self._wanted:
            self._wanted.append(model)
        self._changed.set()
        try:
            await loaded  # the use is counted then
        except asyncio.CancelledError:  # its client has left
            if loaded in model.waiting:
                model.waiting.remove(loaded)
            elif loaded.done() and not loaded.cancelled() and loaded.exception() is None:
                self.leave(model)
            raise

    def end(self) -> None:
        """Refuse all that wait, and load nothing more: the server is shutting down."""
        self._ended = True
        for model in self._models:
            for waiting in model.waiting:
                if not waiting.done():
                    waiting.set_exception(EngineUnavailable("the server is shutting down"))
            model.waiting.clear()

    async def run(self) -> None:
        """Load and unload until cancelled."""
        while True:
            await self._step()
            self._changed.clear()
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _step(self) -> None:
        self._wanted = [x for x in self._wanted if x.waiting]
        if self._wanted:
            await self._serve(self._wanted[0])
        for model in self._models:
            idle_s = self._clock() - model.last_used
            is_idle = model.state is State.LOADED and not model.num_uses
            if is_idle and (idle_s > model.unload_after_s or model.sessions.headroom.scarce):
                await self._unload(model)

    async def _serve(self, model: OnDemand) -> None:
        """Make room for the first in line, and load it; does nothing while its place is in use."""
        if model.state is not State.LOADED:
            leaving = self._leaving()
            if leaving is not None:
                if leaving.num_uses:
                    return
                await self._unload(leaving)
            await self._load(model)
        self._wanted.remove(model)
        for waiting in model.waiting:
            if waiting.done():
                continue
            if model.state is State.LOADED:
                model.num_uses += 1
                waiting.set_result(None)
            else:
                waiting.set_exception(EngineUnavailable(model.failed))
        model.waiting.clear()

    def _leaving(self) -> OnDemand | None:
        """Return the model whose place the first in line is to have; None if one is free."""
        loaded = [x for x in self._models if x.state is State.LOADED]
        if not self._wanted or self._wanted[0] in loaded or len(loaded) < self._places:
            return None
        return min(loaded, key=lambda x: (x.num_uses > 0, x.last_used))

    async def _load(self, model: OnDemand) -> None:
        began = self._clock()
        model.to(State.LOADING)
        await model.engine.start()
        while not (model.engine.ready and model.sessions.settled):
            late = self._clock() - began > model.load_timeout_s
            if late or model.engine.gave_up:
                why = model.engine.trouble or "it takes too long"
                model.failed = f"the model {model.name} cannot be loaded: {why}"
                model.failed_at = self._clock()
                log.error("%s", model.failed)
                await self._end(model)
                return
            await asyncio.sleep(READY_POLL_S)
        model.last_used = self._clock()
        model.to(State.LOADED)
        log.info("model %s was loaded in %.1f s", model.name, self._clock() - began)

    async def _unload(self, model: OnDemand) -> None:
        await self._end(model)
        model.sessions.engine_unloaded(model.rests_in)

    async def _end(self, model: OnDemand) -> None:
        model.to(State.UNLOADING)
        await model.engine.stop(0)
        model.to(State.UNLOADED)
