"""Puts the half beside vLLM's scheduler together: lookups, the hub, the control connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal

import msgspec

from engines.control_server import ControlServer
from engines.vllm_plugin.config import PluginSettings
from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.hot import BlockPool, HotSessions
from engines.vllm_plugin.hub import Hub
from engines.vllm_plugin.lookup import Lookup
from engines.vllm_plugin.messages import RankLost, RankNews
from engines.vllm_plugin.save_tally import SaveTally
from engines.vllm_plugin.verbs import Verbs
from engines.vllm_plugin.watch import Watch
from engines.wire import CodecReport, EngineReport, Notice, Welcome, absent
from kvstore.records import SessionRef
from kvstore.stats import Counters

WORKERS_S: Final = 10.0  # for them to come to the hub
POLL_S: Final = 0.05


class Scheduling:
    """``lookup`` belongs to vLLM's thread; the rest runs on the hub's."""

    def __init__(
        self, settings: PluginSettings, vllm_config: Any, groups: Groups, version: str
    ) -> None:
        self._groups = groups
        block_tokens = int(vllm_config.cache_config.block_size)
        num_ranks = int(vllm_config.parallel_config.world_size)
        counters = Counters()
        self._hot = HotSessions()
        self._saves = SaveTally(num_ranks)
        self._hub = Hub(settings.hub_path, num_ranks, self._hear)
        self.lookup = Lookup(
            self._hub,
            self._hot,
            block_tokens=block_tokens,
            groups=groups,
            parts=not groups.states and vllm_config.device_config.device_type == "cpu",
            num_ranks=num_ranks,
            deadline_s=settings.store.restore_deadline_s,
            max_staged_bytes=settings.store.save_queue_bytes,
            on_admitted=self._hub.admitted,
            on_turn_end=self._turn_ended,
            counters=counters,
        )
        self._verbs = Verbs(
            self._hub,
            self._hot,
            block_tokens=block_tokens,
            counters=counters,
            num_requests=lambda: (self.lookup.num_running, self.lookup.num_waiting),
        )
        self._welcome = Welcome(
            engine="vllm",
            engine_version=version,
            model=settings.served_model_name or str(vllm_config.model_config.model),
            max_context=int(vllm_config.model_config.max_model_len),
            codec=CodecReport(name=""),
            hibernation=True,
        )
        self._control = ControlServer(settings.token, self._welcomed, self._verbs)
        control = self._control.serve(settings.control_address)
        if settings.wait_for_front:
            self._hub.start()
            self._hub.start_behind_front(control)
        else:
            self._hub.start(control)
        self._hub.spawn(Watch(self._hot, self._verbs.look, self._control.publish).run)

    def bind(self, pool: BlockPool) -> None:
        self._hot.bind(pool, self._groups)

    async def report(self) -> EngineReport:
        """Raises as ``Hub.ask`` does. On the hub's loop: see ``spawn``."""
        return await self._verbs.stats()

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._hub.spawn(work)

    def close(self) -> None:
        self._hub.close()

    async def _welcomed(self) -> Welcome:
        """The workers say which codec they took; they may be a moment behind."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WORKERS_S):
                while not self._hub.ready:
                    await asyncio.sleep(POLL_S)
        try:
            codec = await self._verbs.codec()
        except (ConnectionError, TimeoutError):  # a worker is missing; its next report will tell
            return self._welcome
        return msgspec.structs.replace(self._welcome, codec=codec)

    def _turn_ended(self, session: SessionRef) -> None:
        self._hub.spawn(partial(self._tell, "turn", session))

    def _hear(self, news: RankNews) -> None:
        """On the hub's loop."""
        if isinstance(news, RankLost):
            self._hub.spawn(partial(self._tell_lost, news.session))
        elif self._saves.is_whole(news):
            self._hub.spawn(partial(self._tell, "saved", news.session))

    async def _tell(self, cause: Literal["turn", "saved"], session: SessionRef) -> None:
        report = await self._verbs.look(session)
        if report is not None:
            self._control.publish(Notice(cause, report))

    async def _tell_lost(self, session: SessionRef) -> None:
        """One rank's part is enough to lose; a turn may have saved the session anew meanwhile."""
        report = await self._verbs.look(session)
        if report is None or report.tier is None:
            self._control.publish(Notice("lost", report or absent(session)))
