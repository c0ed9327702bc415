"""The parts of one app, and the operations on all of them: drain and cut."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from engines.pool.hub_cache import HubCache
from engines.pool.loading import Loading
from gateway.config import GatewayConfig
from gateway.edge.bodies import BodyBudget
from gateway.edge.key_limits import KeyLimits
from gateway.edge.key_list import KeyList
from gateway.edge.tier_bytes import TierBytes
from gateway.keys import Tenants
from gateway.models import ENGINE_POLL_S, Models
from gateway.shared.shared_sessions import SharedSessions
from gateway.stored.stored import Stored
from gateway.watch.metrics import Metrics
from gateway.watch.telemetry import LogRing, Tracing

LAST_WORDS_S = 1.0  # for all streams to send their ending


@dataclass
class Gateway:
    """The parts of one app, at ``app.state.gateway``.

    Once it serves, ``config`` changes when settings are read again, and ``draining`` at the end.
    """

    config: GatewayConfig
    models: Models
    tenants: Tenants
    metrics: Metrics
    bodies: BodyBudget
    limits: KeyLimits
    keys: KeyList
    tier_bytes: TierBytes
    stored: Stored = field(default_factory=Stored)
    loading: Loading | None = None  # None: every model is loaded for as long as the server runs
    shared_sessions: SharedSessions | None = None  # None: no other server shares any with this one
    tracing: Tracing = field(default_factory=Tracing)
    log_ring: LogRing = field(default_factory=LogRing)
    hub: HubCache = field(default_factory=HubCache)
    started_at: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @property
    def num_running(self) -> int:
        """Turns that hold a slot, of all models."""
        return sum(x.sessions.num_running for x in self.models)

    def restart_largest(self, why: str) -> None:
        """Restart the engine that last reported the most memory; see ``Engine.restart``."""
        running = [x for x in self.models if x.engine.ready] or list(self.models)
        max(running, key=lambda x: x.held_bytes).engine.restart(why)

    async def cut(self) -> None:
        """End the running turns now; a stream ends with an error event."""
        ending = asyncio.create_task(self._stop_engines(0), name="engine-cut")
        loop = asyncio.get_running_loop()
        until = loop.time() + LAST_WORDS_S
        while self.num_running and loop.time() < until:
            await asyncio.sleep(ENGINE_POLL_S)
        ending.cancel()  # when this process is gone, the engines save their sessions and exit

    async def drain(self) -> None:
        """Admit no new turns, and let the running ones finish within ``drain_s``.

        Streams that still run after that end with an error event, as they do when an engine dies.
        """
        self.draining = True
        if self.loading is not None:
            self.loading.end()
        for model in self.models:
            model.live.draining = True
            model.sessions.stop_admitting()
        await self._stop_engines(self.config.drain_s)

    async def _stop_engines(self, drain_s: float) -> None:
        await asyncio.gather(*(x.engine.stop(drain_s) for x in self.models))
