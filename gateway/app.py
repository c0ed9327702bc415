"""The ASGI app: its routes, its error handlers, and the start and stop of its engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from engines.http import CACHE_HEADER, SESSION_HEADER
from engines.pool.loading import Loading
from gateway import openapi, sessions
from gateway.admin import findings, shelf
from gateway.admin import routes as admin
from gateway.anthropic import routes as anthropic
from gateway.config import GatewayConfig
from gateway.dashboard import routes as dashboard
from gateway.edge.bodies import BodyBudget
from gateway.edge.key_limits import KeyLimits
from gateway.edge.key_list import KeyList
from gateway.edge.rates import Rates
from gateway.edge.tier_bytes import TierBytes
from gateway.errors import FORESEEN, respond
from gateway.gateway import Gateway
from gateway.keys import Tenants
from gateway.models import Models, ServedModel
from gateway.openai import chat, conversations, models, stored_chats
from gateway.openai.responses import routes as responses
from gateway.relay.answer import STORED_HEADER
from gateway.request.middleware import RequestMiddleware
from gateway.shared.shared_sessions import SharedSessions
from gateway.stored.stored import Stored
from gateway.watch.metrics import Metrics
from scheduler.headroom import Headroom

log = logging.getLogger("thermocline.gateway")

RESTART_LOOP_S = 1.0
ROUTES = (
    chat,
    stored_chats,
    responses,
    conversations,
    models,
    anthropic,
    sessions,
    openapi,
    admin,
    findings,
    shelf,
    dashboard,
)


def create_app(
    config: GatewayConfig,
    models: Sequence[ServedModel],
    tenants: Tenants,
    metrics: Metrics,
    stored: Stored | None = None,
    loading: Loading | None = None,
    headroom: Headroom | None = None,
    rates: Rates | None = None,
    shared_sessions: SharedSessions | None = None,
) -> FastAPI:
    """Build the app from parts that ``launch`` has made.

    The app's lifespan starts and stops the engines. Without ``stored`` nothing is stored, and
    without ``loading`` all models are loaded from the start. ``headroom`` watches the memory that
    several models share: when almost none is left, the engine that holds most is restarted.
    ``rates`` counts what keys use, and ``shared_sessions`` lists sessions, over all gateways.
    """
    served, limits = Models(models), KeyLimits(config.usual_limits, rates)
    tier_bytes = TierBytes(served.engines, tenants, lambda: limits.usual, metrics.tenants_full)
    gateway = Gateway(
        config=config,
        models=served,
        tenants=tenants,
        metrics=metrics,
        stored=stored or Stored(),
        loading=loading,
        bodies=BodyBudget(config.max_bodies_bytes),
        limits=limits,
        keys=KeyList(tenants, config),
        tier_bytes=tier_bytes,
        shared_sessions=shared_sessions,
    )
    limits.rates.on_change = metrics.limits_shared
    # FastAPI's pages load scripts from another host, and its OpenAPI document lacks our bodies.
    app = FastAPI(
        title="Thermocline",
        lifespan=partial(_running, gateway, headroom),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    for module in ROUTES:  # ``include_router`` would resolve arguments, also of a ``PlainRoute``
        app.router.routes += module.router.routes
    for kind in FORESEEN:
        app.add_exception_handler(kind, respond)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", SESSION_HEADER, CACHE_HEADER, STORED_HEADER],
        )
    app.add_middleware(RequestMiddleware, gateway=gateway)
    return app


@asynccontextmanager
async def _running(
    gateway: Gateway, headroom: Headroom | None, app: FastAPI
) -> AsyncIterator[None]:
    lasting = [("limiting the bytes of tenants", gateway.tier_bytes.run)]
    for model in gateway.models:
        if model.on_demand is None:
            await model.engine.start()
        lasting.append(("the sessions' housekeeping", model.sessions.run))
    if gateway.shared_sessions is not None:
        lasting.append(("sharing sessions", gateway.shared_sessions.run))
    if gateway.limits.rates.on_redis:
        lasting.append(("sharing keys' limits", gateway.limits.rates.run))
    tasks = [asyncio.create_task(_again_and_again(run, what), name=what) for what, run in lasting]
    if gateway.loading is not None:
        tasks.append(asyncio.create_task(gateway.loading.run(), name="model-loading"))
    if headroom is not None and headroom.guards:
        guarding = headroom.guard(gateway.restart_largest)
        tasks.append(asyncio.create_task(guarding, name="memory-guard"))
    gateway.stored.start()
    try:
        yield
    finally:
        for model in gateway.models:
            model.sessions.stop_admitting()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(x.engine.stop(0) for x in gateway.models))
        await gateway.hub.stop()
        await gateway.stored.close()
        await asyncio.to_thread(gateway.tracing.close)


async def _again_and_again(run: Callable[[], Awaitable[None]], what: str) -> None:
    """Run a background task until cancelled, and start it again whenever it fails or returns.

    A defect in it must not end the service: without housekeeping, sessions stay hot until the
    engine itself evicts them; without sharing, each gateway counts for itself.
    """
    while True:
        try:
            await run()
        except Exception:  # the edge of the process
            log.exception("%s failed; starting it again", what)
        await asyncio.sleep(RESTART_LOOP_S)
