"""Assembles the scheduler side of the plug-in: tracker, hub and control connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal
from weakref import WeakValueDictionary

import msgspec

from engines.host.control_server import ControlServer
from engines.vllm_plugin.config import PluginSettings
from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.inventory import Inventory, wants_events
from engines.vllm_plugin.messages import (
    Findings,
    Forward,
    ForwardDone,
    PeerNews,
    RankLost,
    RankRests,
    RankSaved,
    Wake,
)
from engines.vllm_plugin.scheduler.hub import Hub, SaveAcks
from engines.vllm_plugin.scheduler.measured_requests import Forwards, MeasuredRequests
from engines.vllm_plugin.scheduler.request_tracker import RequestTracker
from engines.vllm_plugin.scheduler.resident_sessions import BlockPool, ResidentSessions
from engines.vllm_plugin.scheduler.restores import Restores
from engines.vllm_plugin.scheduler.shared_prefills import PrefillsInFlight
from engines.vllm_plugin.scheduler.tracked_request import TokenBlocks
from engines.vllm_plugin.scheduler.turn_saves import TurnSaves
from engines.vllm_plugin.scheduler.verbs import VllmVerbs
from engines.vllm_plugin.scheduler.welcome import welcome_of
from engines.wire import ALL_CHANGED, Notice, SessionRef, SessionReport, Welcome, absent
from kvstore.session import SessionName
from kvstore.stats import Counters

logger = logging.getLogger("thermocline.vllm")

EVERY_S: Final = 1.0
WORKERS_S: Final = 10.0  # how long to wait for the workers to connect to the hub
POLL_S: Final = 0.05
WAKE_S: Final = 0.1


class EvictionWatch:
    """Checks all quiet sessions every ``every_s`` seconds. On the hub's event loop."""

    def __init__(
        self,
        resident: ResidentSessions,
        look: Callable[[SessionRef], Awaitable[SessionReport | None]],
        publish: Callable[[Notice], None],
        every_s: float = EVERY_S,
    ) -> None:
        """``look`` asks the ranks for a session's report; None if no rank has the session."""
        self._resident = resident
        self._look = look
        self._publish = publish
        self._every_s = every_s

    async def run(self) -> None:
        """Check sessions and publish changes until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            for name in self._resident.pop_cooled():
                try:
                    await self._notify(name)
                except OSError as error:  # no rank answers: the engine is ending
                    logger.warning("the gateway was not informed that a session is cold: %s", error)
                except Exception:  # top level of this task: one session must not end the watch
                    logger.exception("the gateway was not informed that a session is cold")

    async def _notify(self, name: SessionName) -> None:
        session = SessionRef(*name, b"")
        report = await self._look(session)
        cause: Literal["dropped", "lost"] = "dropped" if report is not None else "lost"
        self._publish(Notice(cause, report or absent(session)))


class SchedulerSide:
    """The parts of the plug-in that run in EngineCore.

    ``tracker`` belongs to vLLM's thread; all other parts run on the thread of ``hub``.
    """

    def __init__(
        self, settings: PluginSettings, vllm_config: Any, groups: Groups, version: str
    ) -> None:
        """Raises ``OSError`` or ``ValueError``: a socket cannot be opened."""
        self._groups = groups
        num_ranks = int(vllm_config.parallel_config.world_size)
        block_tokens = int(vllm_config.cache_config.block_size)
        reports = wants_events(vllm_config)
        blocks = TokenBlocks(block_tokens, groups, keeps_ids=reports)
        self.inventory = Inventory(block_tokens) if reports else None
        counters = Counters()
        self._resident = ResidentSessions()
        self._acks = SaveAcks(num_ranks)
        self._looks: WeakValueDictionary[SessionName, asyncio.Lock] = WeakValueDictionary()
        self.hub = Hub(settings.hub_path, num_ranks, self._receive)
        self._forwards = Forwards(self.hub, lambda: not self.tracker.num_requests)
        saves = TurnSaves(self._resident, blocks, num_ranks)
        self.tracker = RequestTracker(
            Restores(
                self.hub,
                blocks,
                deadline_s=settings.store.restore_deadline_s,
                max_staged_bytes=settings.store.save_queue_bytes,
            ),
            PrefillsInFlight(blocks, int(vllm_config.scheduler_config.max_num_batched_tokens)),
            saves,
            self._resident,
            MeasuredRequests(self._forwards.order_of, self._resident, saves, blocks),
            on_admitted=self.hub.send,
            on_turn_end=lambda x: self.hub.spawn(partial(self._notify, "turn", x)),
            counters=counters,
        )
        self.verbs = VllmVerbs(
            self.hub,
            self._resident,
            self.tracker,
            block_tokens=block_tokens,
            counters=counters,
            is_reported=self._is_reported,
        )
        self._welcome = welcome_of(settings, vllm_config, version)
        self._control = ControlServer(settings.token, self._welcomed, self.verbs)
        control = self._control.serve(settings.control_address)
        if settings.wait_for_front:
            self.hub.start()
            self.hub.start_after_front(control)
        else:
            self.hub.start(control)
        self.hub.spawn(EvictionWatch(self._resident, self._look, self._control.publish).run)
        if reports:
            self.hub.spawn(self._wake_idle_engine)

    @property
    def has_work(self) -> bool:
        """True if an idle engine must continue to run steps."""
        return self.tracker.has_work or self._has_events

    @property
    def _has_events(self) -> bool:
        """True if there are KV events to report, about our tiers or about blocks to be dropped."""
        if self.inventory is None:
            return False
        return self.inventory.has_news or self._resident.has_drops

    def _is_reported(self, name: SessionName) -> bool:
        """True if the session was reported, or no HTTP server can wake the engine to report it."""
        if self.inventory is None or not self.hub.num_fronts:
            return True
        return self.inventory.is_reported(name)

    async def _wake_idle_engine(self) -> None:
        """Wake the engine to publish events; an idle engine would keep them until a request."""
        while True:
            await asyncio.sleep(WAKE_S)
            if self._has_events:
                self.hub.send(Wake())

    def bind(self, pool: BlockPool) -> None:
        """Set vLLM's block pool, before the first request."""
        self._resident.bind(pool, self._groups)

    async def _welcomed(self) -> Welcome:
        """The greeting to the gateway, with the codec that the workers chose.

        The workers may start a moment later, so this waits for them.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(WORKERS_S):
                while not self.hub.ready:
                    await asyncio.sleep(POLL_S)
        try:
            codec = await self.verbs.codec()
        except (ConnectionError, TimeoutError):  # a worker is missing; its next report will show it
            return self._welcome
        live, bf16 = self.hub.kv_sizes
        return msgspec.structs.replace(self._welcome, codec=codec, live_kv=live, bf16_kv=bf16)

    def _receive(self, news: PeerNews) -> None:
        """Process a peer's message that is not an answer. On the hub's event loop."""
        match news:
            case RankLost():
                self.hub.spawn(partial(self._report_lost, news))
            case RankSaved() if self._acks.completes(news):
                self.hub.spawn(partial(self._notify, "saved", news.session))
            case RankRests() if self.inventory is not None:
                self.inventory.update(news)
            case Forward() | ForwardDone() | Findings():
                self._forwards.receive(news)

    async def _notify(self, cause: Literal["turn", "saved"], session: SessionRef) -> None:
        report = await self._look(session)
        if report is not None:
            self._control.publish(Notice(cause, report))

    async def _look(self, session: SessionRef) -> SessionReport | None:
        """Return a session's report for a notice.

        Raises ``OSError``: a rank does not answer. Then this asks the gateway to list all sessions,
        which it repeats until it has an answer, so that it does not miss the change.
        """
        try:
            # One look at a session after the other: an older one, answered late, would otherwise be
            # reported last.
            async with self._looks.setdefault(session.name, asyncio.Lock()):
                return await self.verbs.look(session)
        except OSError:
            self._control.publish(Notice("moved", absent(session), ALL_CHANGED))
            raise

    async def _report_lost(self, news: RankLost) -> None:
        """Report to the gateway that a session is lost, if that is still true, or its new tier.

        The loss of one rank's share loses the session; a turn may have saved it again meanwhile.
        """
        report = await self._look(news.session)
        if report is None or report.tier is None:
            self._control.publish(Notice("lost", report or absent(news.session), news.why))
        elif not news.is_gone:
            self._control.publish(Notice("moved", report, news.why))
