"""Models on demand: which one is loaded, which requests wait, and where their sessions go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from engines.base import SAVE_S, EngineUnavailable, SessionRef
from engines.pool.loading import (
    MAX_OF_TENANT,
    OVERDUE_S,
    RETRY_AFTER_S,
    STAY_S,
    UNLOAD_S,
    Loading,
)
from engines.pool.on_demand import LoadState, OnDemand
from engines.wire import EngineReport, Notice
from scheduler.config import SchedulerConfig
from scheduler.session import Event
from scheduler.sessions import Overloaded, SessionManager
from tests.unit.engines.pool.replicas import NO_WORK
from tests.unit.gateway.in_process import WELCOME, RecordingEngine
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(60)


class Engine(RecordingEngine):
    """Is ready once it has been started, unless it is to fail."""

    def __init__(self) -> None:
        super().__init__(welcome=None)
        self.gave_up = self.fails = self.hangs = False
        self.num_starts = self.save_queue_bytes = self.num_looks = 0
        self._connected: asyncio.Queue[None] = asyncio.Queue()

    async def start(self) -> None:
        self.num_starts += 1
        self.gave_up = self.fails
        if not (self.fails or self.hangs):
            self.welcome = msgspec.structs.replace(WELCOME)  # another one for each connection
            self._connected.put_nowait(None)

    async def stats(self) -> EngineReport:
        self.num_looks += 1
        return msgspec.structs.replace(NO_WORK, save_queue_bytes=self.save_queue_bytes)

    async def stop(self, drain_s: float, save_s: float = SAVE_S) -> None:
        self.gave_up = False
        self.save_s = save_s
        await super().stop(drain_s)

    async def notices(self) -> AsyncIterator[Notice | None]:
        while True:
            yield await self._connected.get()


class Rig:
    """Some models on demand, a clock that stands still, and the loader."""

    def __init__(self, num_models: int = 2, places: int = 1) -> None:
        self.now = 1000.0
        self.models = [self._model(f"m{i}") for i in range(num_models)]
        self.loading = Loading(self.models, places, 120.0, clock=lambda: self.now)

    def _model(self, name: str) -> OnDemand:
        engine = Engine()
        known = {"salt_of": lambda _: b"", "clock": lambda: self.now}
        sessions = SessionManager(engine, SchedulerConfig(), **known)
        return OnDemand(name, engine, sessions, 60.0, 5.0, "disk")

    async def __aenter__(self) -> Rig:
        keep = [x.sessions.run() for x in self.models]
        self._tasks = [asyncio.create_task(x) for x in [self.loading.run(), *keep]]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def begin(self, number: int, tenant: str = "t") -> asyncio.Task[None]:
        return asyncio.create_task(self.loading.enter(self.models[number], tenant))

    async def waiting(self, number: int, tenant: str = "t") -> asyncio.Task[None]:
        """A request that stands in line by now, or has what it asked for."""
        begun = self.begin(number, tenant)
        await asyncio.sleep(0.05)
        return begun

    async def until(self, number: int, state: LoadState) -> None:
        async with asyncio.timeout(20):
            while self.models[number].state is not state:
                await asyncio.sleep(0.01)


async def test_a_model_is_loaded_when_it_is_asked_for_and_stays_while_it_is_used():
    async with Rig(places=2) as rig:
        assert rig.models[0].state is LoadState.UNLOADED
        await asyncio.gather(rig.begin(0), rig.begin(0))
        assert (rig.models[0].state, rig.models[0].num_uses) == (LoadState.LOADED, 2)
        await rig.begin(1)
        assert [x.engine.num_starts for x in rig.models] == [1, 1]
        rig.now += 1000
        rig.loading.leave(rig.models[1])
        rig.now += 61
        await rig.until(1, LoadState.UNLOADED)
        assert rig.models[0].state is LoadState.LOADED


async def test_one_place_is_given_to_the_first_in_line_once_nothing_uses_it():
    async with Rig(num_models=3) as rig:
        await rig.begin(0)
        second, third = rig.begin(1), rig.begin(2)
        await asyncio.sleep(0.05)
        await rig.begin(0)  # the place cannot be given yet
        rig.now += OVERDUE_S
        later = await rig.waiting(0)  # does not keep the others out for ever
        assert rig.models[0].state is LoadState.LOADED and not (second.done() or later.done())
        rig.loading.leave(rig.models[0])
        rig.loading.leave(rig.models[0])
        await second
        assert [x.state is LoadState.LOADED for x in rig.models] == [False, True, False]
        rig.loading.leave(rig.models[1])
        await third
        assert not later.done()
        rig.loading.leave(rig.models[2])
        await later
        assert rig.models[0].num_uses == 1


async def test_a_request_waits_for_a_place_only_so_long():
    async with Rig() as rig:
        await rig.begin(0)
        waiting = await rig.waiting(1)
        rig.now += OVERDUE_S
        closed_out = await rig.waiting(0)
        rig.now += 111
        with pytest.raises(Overloaded, match="no place for the model m1"):
            await waiting
        await closed_out  # no other request wants the place any more


async def test_one_tenant_does_not_fill_the_line():
    async with Rig() as rig:
        await rig.begin(0)
        many = [rig.begin(1) for _ in range(MAX_OF_TENANT)]
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="too many requests wait"):
            await rig.begin(1)
        other = await rig.waiting(1, "another")
        assert not other.done()
        rig.loading.leave(rig.models[0])
        await asyncio.gather(other, *many)


async def test_a_model_that_loads_for_long_keeps_no_other_from_a_free_place():
    async with Rig(num_models=3, places=2) as rig:
        rig.models[0].engine.hangs = True
        slow = rig.begin(0)
        await rig.until(0, LoadState.LOADING)
        await rig.begin(1)
        assert not slow.done()
        rig.now += 6  # its time to load is over
        with pytest.raises(EngineUnavailable, match="m0 cannot be loaded: it is having a rest"):
            await slow
        await rig.begin(2)


async def test_a_model_that_cannot_be_loaded_is_refused_with_its_reason_and_tried_again_later():
    async with Rig() as rig:
        broken = rig.models[0].engine
        broken.fails = True
        first, second = await asyncio.gather(rig.begin(0), rig.begin(0), return_exceptions=True)
        assert isinstance(first, EngineUnavailable) and isinstance(second, EngineUnavailable)
        assert str(first) == "the model m0 cannot be loaded: it is having a rest"
        await rig.begin(1)  # others go on
        with pytest.raises(EngineUnavailable, match="m0 cannot be loaded"):
            await rig.begin(0)
        assert broken.num_starts == 1
        broken.fails = False
        rig.loading.leave(rig.models[1])
        rig.now += RETRY_AFTER_S
        await rig.begin(0)
        assert rig.models[0].state is LoadState.LOADED


async def test_a_model_that_cannot_be_loaded_takes_others_places_ever_less_often():
    async with Rig(num_models=1) as rig:
        rig.models[0].engine.fails = True
        for failures in range(3):
            with pytest.raises(EngineUnavailable):
                await rig.begin(0)
            await rig.until(0, LoadState.UNLOADED)
            rig.now += RETRY_AFTER_S * 2**failures - 1
            with pytest.raises(EngineUnavailable):
                await rig.begin(0)
            assert rig.models[0].engine.num_starts == failures + 1
            rig.now += 1
        rig.models[0].engine.fails = False
        await rig.begin(0)
        assert rig.models[0].num_failures == 0


async def test_tenants_take_turns_in_the_line():
    async with Rig(num_models=5) as rig:
        await rig.begin(0, "one")
        many = [rig.begin(i, "one") for i in (1, 2, 3)]
        await asyncio.sleep(0.05)
        other = await rig.waiting(4, "two")
        rig.now += STAY_S[0]
        rig.loading.leave(rig.models[0])
        await many[0]  # it came first
        rig.now += STAY_S[0]
        rig.loading.leave(rig.models[1])
        await asyncio.wait_for(other, 20)
        assert not (many[1].done() or many[2].done())
        for i in (4, 2):
            rig.now += STAY_S[0]
            rig.loading.leave(rig.models[i])
            await asyncio.wait_for(many[1 if i == 4 else 2], 20)


async def test_a_client_that_leaves_holds_no_place():
    async with Rig() as rig:
        await rig.begin(0)
        waiting = await rig.waiting(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await rig.begin(0)
        assert rig.models[1].engine.num_starts == 0
        assert rig.models[0].num_uses == 2


async def test_a_client_that_leaves_in_the_moment_of_loading_is_not_counted():
    async with Rig() as rig:
        waiting = rig.begin(0)
        while not waiting.done() and rig.models[0].num_uses == 0:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        entered = not waiting.cancelled()
        assert rig.models[0].num_uses == entered


async def test_once_the_server_ends_all_that_wait_are_refused_and_nothing_is_loaded():
    async with Rig() as rig:
        await rig.begin(0)
        waiting = await rig.waiting(1)
        rig.loading.leave(rig.models[0])  # its place would be given away now
        rig.loading.end()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await waiting
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await rig.begin(0)
        await asyncio.sleep(0.1)
        assert rig.models[1].engine.num_starts == 0


async def test_sessions_of_an_unloaded_model_are_cold_on_the_tier_that_outlives_it():
    async with Rig() as rig:
        model = rig.models[0]
        await rig.begin(0)
        session = model.sessions.table.begin(SessionRef("t", "s", b""))
        session.known = True
        model.sessions.table.end(session)
        rig.loading.leave(model)
        rig.now += 61
        await rig.until(0, LoadState.UNLOADED)
        (view,) = model.sessions.list("t")
        assert (view.state, view.tier) == ("cold", "disk")
        assert session.can(Event.TURN)


async def test_two_tenants_do_not_swap_models_at_each_turn():
    async with Rig() as rig:
        await rig.begin(0, "one")
        rig.loading.leave(rig.models[0])
        other = await rig.waiting(1, "two")
        assert rig.models[0].state is LoadState.LOADED and not other.done()
        await rig.begin(0, "one")  # has it meanwhile
        rig.loading.leave(rig.models[0])
        rig.now += STAY_S[0]
        await asyncio.wait_for(other, 20)
        rig.loading.leave(rig.models[1])
        await asyncio.wait_for(rig.begin(0, "two"), 20)  # its own models make way at once


async def test_an_engine_that_is_unloaded_may_save_for_long_and_loads_are_counted():
    counted = []
    async with Rig() as rig:
        rig.loading._on_load = lambda *load: counted.append(load)
        await rig.begin(0)
        rig.loading.leave(rig.models[0])
        rig.models[1].engine.fails = True
        with pytest.raises(EngineUnavailable):
            await rig.begin(1)
        assert rig.models[0].engine.save_s == UNLOAD_S > SAVE_S
    assert [(name, loaded) for name, _, loaded in counted] == [("m0", True), ("m1", False)]


async def test_an_engine_that_still_packs_is_not_ended():
    async with Rig() as rig:
        model = rig.models[0]
        await rig.begin(0)
        rig.loading.leave(model)
        model.engine.save_queue_bytes = 7
        rig.now += 61
        await rig.until(0, LoadState.UNLOADING)
        looks = model.engine.num_looks
        await eventually(lambda: model.engine.num_looks >= looks + 3)
        assert model.engine.ready  # it was not ended
        model.engine.save_queue_bytes = 0
        await rig.until(0, LoadState.UNLOADED)


async def test_an_operator_loads_and_unloads_a_model_that_no_request_asked_for():
    async with Rig() as rig:
        first = rig.models[0]
        rig.loading.load(first, "root")
        await rig.until(0, LoadState.LOADED)
        await eventually(lambda: first.num_uses == 0)  # the load's own use has ended
        await rig.begin(0)
        assert not rig.loading.unload(first)  # a request uses it
        rig.loading.leave(first)
        assert rig.loading.unload(first)
        assert not rig.loading.unload(first)
        await rig.until(0, LoadState.UNLOADED)


async def test_an_operator_sees_who_makes_way_and_takes_a_load_back():
    async with Rig() as rig:
        first, second = rig.models
        assert rig.loading.displaces(second) is None
        await rig.begin(0)
        assert rig.loading.displaces(second) is first
        assert not rig.loading.take_back(second)
        rig.loading.load(second, "root")
        await eventually(lambda: rig.loading.is_queued(second))
        assert rig.loading.progress(second).endswith("number 1 in line, in place of m0")
        assert rig.loading.take_back(second) and not rig.loading.is_queued(second)
        await eventually(lambda: not second.waiting)
        rig.loading.leave(first)
        rig.now += 20.0  # so long it stays for its own tenants
        rig.loading.load(second, "root")  # again, and to its end
        await rig.until(1, LoadState.LOADED)
        await eventually(lambda: second.num_uses == 0)
        assert not rig.loading.is_queued(second)
        assert rig.loading.displaces(first) is second


async def test_a_load_that_is_taken_back_keeps_the_requests_in_line():
    async with Rig() as rig:
        await rig.begin(0)
        rig.loading.load(rig.models[1], "root")
        asked = rig.begin(1)
        await eventually(lambda: len(rig.models[1].waiting) == 2)
        assert rig.loading.take_back(rig.models[1])
        rig.loading.leave(rig.models[0])
        rig.now += 20.0
        await asked
        assert rig.models[1].num_uses == 1


async def test_an_operator_tries_again_at_once_and_is_told_why_it_fails():
    async with Rig() as rig:
        first = rig.models[0]
        first.engine.fails = True
        rig.loading.load(first, "root")
        await eventually(lambda: first.failed)
        await rig.until(0, LoadState.UNLOADED)
        assert "cannot be loaded" in first.failed
        with pytest.raises(EngineUnavailable):
            await rig.begin(0)
        first.engine.fails = False
        rig.loading.load(first, "root")
        await rig.until(0, LoadState.LOADED)
        assert first.failed == ""
