"""Loads models on demand and unloads them; their sessions are kept.

Models *on demand* take turns in a few places, since a machine's memory holds only so many. A
request for one that is not loaded waits in line. An engine that ends writes all its sessions to the
tiers that outlive it; the next one finds them there, so that a model comes back with its
conversations.

Belongs to the event loop. ``Loading`` alone changes which models are loaded, in tasks that ``run``
starts. A request must not wait for one model while it uses another: with one place it would wait
for itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Final

from engines.base import EngineError, EngineUnavailable, Overloaded
from engines.pool.on_demand import LoadState, OnDemand, Waiting

log = logging.getLogger("thermocline.engines")

LOOK_EVERY_S: Final = 0.5
READY_POLL_S: Final = 0.05
SAVED_POLL_S: Final = 0.2
# The Retry-After of refused requests. A model that could not be loaded is refused for this time,
# doubled with each further failure up to the maximum, since each try takes another model's place.
RETRY_AFTER_S: Final = 10.0
MAX_RETRY_AFTER_S: Final = 640.0
MAX_WAITING: Final = 256  # requests for models that are not loaded
MAX_OF_TENANT: Final = 64  # one tenant's part of these
# A loaded model takes new requests until the first model in line has waited for its place so long.
OVERDUE_S: Final = 10.0
# A model stays loaded for twice as long as loading took, within these bounds, unless all of its
# tenants wait for the model that needs its place.
STAY_S: Final = (10.0, 60.0)
UNLOAD_S: Final = 600.0  # the most time in which an engine saves its sessions before it ends
MAX_USERS: Final = 1000
SHUTTING_DOWN: Final = "the server is shutting down"


class Loading:
    """Decides which models on demand are loaded; a task of its own loads or unloads each."""

    def __init__(
        self,
        models: Sequence[OnDemand],
        places: int,
        max_wait_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_load: Callable[[str, float, bool], None] = lambda name, seconds, loaded: None,
    ) -> None:
        """
        Args:
            on_load: called after each try with the model's name, the seconds that it took, and
                whether it was loaded.
            places: the most models that may be loaded at once.
            max_wait_s: how long a request waits until its model begins to load.
            clock: in seconds; only differences count.
        """
        self._models = list(models)
        self._places = places
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._on_load = on_load
        self._wanted: list[OnDemand] = []  # in the order in which they were asked for
        self._wanted_since: dict[OnDemand, float] = {}
        self._changed = asyncio.Event()
        self._jobs: set[asyncio.Task[None]] = set()
        self._ahead: dict[OnDemand, asyncio.Task[None]] = {}  # loads that an operator asked for
        self._ended = False

    async def enter(self, model: OnDemand, tenant: str) -> None:
        """Wait until a model is loaded, and use it until ``leave``; it is not unloaded meanwhile.

        Raises:
            EngineUnavailable: it cannot be loaded, or no place for it was free in time.
            Overloaded: too many requests wait for models already, or too many of the tenant's.
        """
        if self._ended:
            raise EngineUnavailable(SHUTTING_DOWN)
        if self._clock() < model.refused_until:
            raise EngineUnavailable(model.failed)
        if self._accepts(model):
            model.num_uses += 1
        else:
            await self._wait(model, tenant)
        if len(model.users) < MAX_USERS:
            model.users.add(tenant)
        model.last_used = self._clock()

    def load(self, model: OnDemand, tenant: str) -> None:
        """Load a model on an operator's order, even soon after it could not be loaded."""
        model.failed, model.refused_until = "", float("-inf")
        if model not in self._ahead:
            self._ahead[model] = self._start(self._load_ahead(model, tenant))

    def is_queued(self, model: OnDemand) -> bool:
        """Return whether an operator's load waits in line, so that it can be taken back."""
        return model in self._ahead and model in self._wanted

    def take_back(self, model: OnDemand) -> bool:
        """Cancel an operator's load in line, not waiting requests; False if there is none."""
        if not self.is_queued(model):
            return False
        self._ahead.pop(model).cancel()
        return True

    def displaces(self, model: OnDemand) -> OnDemand | None:
        """Return the model that would be unloaded to load this one now; None if there is room."""
        before = list(takewhile(lambda x: x is not model, self._wanted))
        taken = [x for x in self._models if x.state is not LoadState.UNLOADED]
        if model.state is not LoadState.UNLOADED or len(before) + len(taken) < self._places:
            return None
        return _longest_unused([x for x in taken if x.state is LoadState.LOADED])

    async def _load_ahead(self, model: OnDemand, tenant: str) -> None:
        try:
            await self.enter(model, tenant)
        except (EngineError, Overloaded) as error:
            model.failed = str(error)
        else:
            self.leave(model)
        self._ahead.pop(model, None)

    def unload(self, model: OnDemand) -> bool:
        """Begin to unload a model; return False if it is not loaded, or requests use it."""
        if model.state is not LoadState.LOADED or model.num_uses:
            return False
        model.to(LoadState.UNLOADING)
        self._start(self._unload(model))
        return True

    def leave(self, model: OnDemand) -> None:
        """End a use of a model."""
        model.num_uses -= 1
        model.last_used = self._clock()
        self._changed.set()

    def progress(self, model: OnDemand) -> str:
        """Return a sentence on the progress of loading, for a request that waits for the model."""
        if model in self._wanted:
            place = self._wanted.index(model) + 1
            words = f"the model {model.name} waits to be loaded, number {place} in line"
            other = self.displaces(model)
            return f"{words}, in place of {other.name}" if other and place == 1 else words
        words = f"the model {model.name} is {model.state.value}"
        if model.state is LoadState.LOADING:
            words += f", for {self._clock() - model.began:.0f} s"
            words += f" of the {model.took_s:.0f} s of last time" if model.took_s else ""
        return words

    def _accepts(self, model: OnDemand) -> bool:
        """Return whether new requests may use the model now.

        They may not if it is to be unloaded for a model that was asked for ``OVERDUE_S`` ago:
        otherwise a model that is always in use would never be unloaded.
        """
        if model.state is not LoadState.LOADED:
            return False
        if model is not self._next_to_unload():
            return True
        return self._clock() - self._wanted_since[self._wanted[0]] < OVERDUE_S

    async def _wait(self, model: OnDemand, tenant: str) -> None:
        waiting = [x for y in self._models for x in y.waiting]
        of_tenant = sum(x.tenant == tenant for x in waiting)
        if len(waiting) >= MAX_WAITING or of_tenant >= MAX_OF_TENANT:
            raise Overloaded("too many requests wait for models to be loaded", RETRY_AFTER_S)
        loaded = Waiting(tenant, asyncio.get_running_loop().create_future(), self._clock())
        model.waiting.append(loaded)
        if model not in self._wanted and model.state is not LoadState.LOADING:
            self._wanted.append(model)
            self._wanted_since[model] = self._clock()
        self._changed.set()
        try:
            await loaded.future  # ``_grant`` has counted the use
        except asyncio.CancelledError:  # its client has left
            if loaded in model.waiting:
                model.waiting.remove(loaded)
            elif not loaded.future.cancelled() and loaded.future.exception() is None:
                self.leave(model)  # it was granted just before
            raise

    def end(self) -> None:
        """Refuse all waiting requests, and load no more: the server is shutting down."""
        self._ended = True
        for model in self._models:
            _refuse_all(model, EngineUnavailable(SHUTTING_DOWN))

    async def run(self) -> None:
        """Load and unload until cancelled."""
        try:
            while True:
                try:
                    self._look()
                except Exception:  # top level of this task: requests must not wait for ever
                    log.exception("the loop that loads models failed; it continues")
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._changed.wait()
        finally:
            jobs = list(self._jobs)
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def _look(self) -> None:
        """Refuse requests that waited too long, load models in line, unload idle ones."""
        for model in self._wanted:
            self._refuse_late(model)
        self._wanted = _in_turns([x for x in self._wanted if x.waiting])
        while not self._ended and self._wanted and self._give_place(self._wanted[0]):
            self._wanted.pop(0)
        for model in self._models:
            idle_s = self._clock() - model.last_used
            if idle_s > model.unload_after_s or model.sessions.memory_is_scarce:
                self.unload(model)

    def _refuse_late(self, model: OnDemand) -> None:
        late = [x for x in model.waiting if self._clock() - x.since > self._max_wait_s]
        for waiting in late:
            model.waiting.remove(waiting)
            if not waiting.future.done():
                words = f"no place for the model {model.name} became free in time"
                waiting.future.set_exception(Overloaded(words, RETRY_AFTER_S))

    def _give_place(self, model: OnDemand) -> bool:
        """Begin to load the first in line; False if another must be unloaded before."""
        if model.state is LoadState.LOADED:  # it was to be unloaded, and stays
            self._grant(model)
            return True
        if model.state is not LoadState.UNLOADED:
            return False
        taken = sum(x.state is not LoadState.UNLOADED for x in self._models)
        if taken < self._places:
            model.to(LoadState.LOADING)
            self._start(self._load(model))
            return True
        leaving = self._next_to_unload()
        if leaving is not None:
            self.unload(leaving)
        return False

    def _next_to_unload(self) -> OnDemand | None:
        """Return the model to unload for the first in line; None if it needs no place."""
        if not self._wanted or self._wanted[0].state is not LoadState.UNLOADED:
            return None
        if sum(x.state is not LoadState.UNLOADED for x in self._models) < self._places:
            return None
        if any(x.state is LoadState.UNLOADING for x in self._models):  # a place is becoming free
            return None
        wanting = {x.tenant for x in self._wanted[0].waiting}
        loaded = [
            x
            for x in self._models
            if x.state is LoadState.LOADED
            and (self._clock() >= x.stays_until or not x.users - wanting)
        ]
        return _longest_unused(loaded)

    def _grant(self, model: OnDemand) -> None:
        model.last_used = self._clock()
        for waiting in model.waiting:
            if not waiting.future.done():
                model.num_uses += 1
                waiting.future.set_result(None)
        model.waiting.clear()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        job = asyncio.create_task(work, name="model-load")
        self._jobs.add(job)
        job.add_done_callback(self._job_done)
        return job

    def _job_done(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        self._changed.set()
        if not job.cancelled() and (error := job.exception()) is not None:
            log.error("a model was not loaded or unloaded as it should be", exc_info=error)

    async def _load(self, model: OnDemand) -> None:
        model.began, why = self._clock(), ""
        try:
            await model.engine.start()
            while not (model.engine.ready and model.sessions.settled):
                if self._clock() - model.began > model.load_timeout_s or model.engine.gave_up:
                    why = model.engine.trouble or "loading takes too long"
                    break
                await asyncio.sleep(READY_POLL_S)
        except Exception as error:  # of an engine class that the operator named, perhaps
            log.exception("the model %s cannot be loaded", model.name)
            why = str(error) or type(error).__name__
        if not why:
            model.to(LoadState.LOADED)
            model.was_listed, model.num_failures, model.failed = True, 0, ""
            model.took_s = took_s = self._clock() - model.began
            log.info("model %s was loaded in %.1f s", model.name, took_s)
            self._on_load(model.name, took_s, True)
            model.users = {x.tenant for x in model.waiting}
            model.stays_until = self._clock() + min(STAY_S[1], max(STAY_S[0], 2 * took_s))
            self._grant(model)
            return
        model.failed = f"the model {model.name} cannot be loaded: {why}"
        wait_s = min(MAX_RETRY_AFTER_S, RETRY_AFTER_S * 2**model.num_failures)
        model.num_failures += 1
        model.refused_until = self._clock() + wait_s
        log.error("%s", model.failed)
        self._on_load(model.name, self._clock() - model.began, False)
        _refuse_all(model, EngineUnavailable(model.failed))
        model.to(LoadState.UNLOADING)
        await self._end_engine(model)

    async def _unload(self, model: OnDemand) -> None:
        await self._until_saved(model)
        await self._end_engine(model)
        model.sessions.engine_unloaded(model.rests_in)

    async def _until_saved(self, model: OnDemand) -> None:
        """Wait until the engine's queue of saves is empty: an ending engine saves only briefly."""
        until = self._clock() + UNLOAD_S
        with suppress(EngineError):  # it has ended: do not wait
            while (await model.engine.stats()).save_queue_bytes and self._clock() < until:
                await asyncio.sleep(SAVED_POLL_S)

    async def _end_engine(self, model: OnDemand) -> None:
        try:
            await model.engine.stop(0, UNLOAD_S)
        finally:
            model.to(LoadState.UNLOADED)


def _longest_unused(loaded: Sequence[OnDemand]) -> OnDemand | None:
    return min(loaded, key=lambda x: (x.num_uses > 0, x.last_used), default=None)


def _in_turns(wanted: Sequence[OnDemand]) -> list[OnDemand]:
    """Order models by turns of tenants: a tenant's second one after the first of each other.

    Args:
        wanted: in the order in which they were asked for, or as an earlier call returned them.
    """
    num_before: Counter[str] = Counter()  # models of each tenant
    turns = {}
    for model in wanted:
        tenants = {x.tenant for x in model.waiting}
        turns[model] = min(num_before[x] for x in tenants)
        num_before.update(tenants)
    return sorted(wanted, key=turns.__getitem__)


def _refuse_all(model: OnDemand, error: Exception) -> None:
    for waiting in model.waiting:
        if not waiting.future.done():
            waiting.future.set_exception(error)
    model.waiting.clear()
