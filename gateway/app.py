"""The app: routes, error shapes, and the life of what stands behind them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from engines.base import Engine
from gateway import chat, health, models, sessions
from gateway.config import GatewayConfig
from gateway.context import Gateway
from gateway.errors import FORESEEN, respond
from gateway.front import Front
from gateway.identity import KnownChats
from gateway.keys import Tenants
from gateway.metrics import Metrics
from scheduler.sessions import SessionManager

log = logging.getLogger("thermocline.gateway")

RESTART_LOOP_S = 1.0


def create_app(
    config: GatewayConfig,
    engine: Engine,
    session_manager: SessionManager,
    tenants: Tenants,
    metrics: Metrics,
) -> FastAPI:
    """The app around parts that ``launch`` has made. Its lifespan starts and stops the engine."""
    gateway = Gateway(
        config=config,
        engine=engine,
        sessions=session_manager,
        tenants=tenants,
        metrics=metrics,
        chats=KnownChats(config.max_known_chats),
    )
    # No documentation pages: FastAPI's fetch scripts from a foreign server.
    app = FastAPI(
        title="Thermocline",
        lifespan=_lifespan(gateway),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    for room in (chat, models, sessions, health):
        app.include_router(room.router)
    for kind in FORESEEN:
        app.add_exception_handler(kind, respond)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-thermocline-session", "x-thermocline-cache"],
        )
    app.add_middleware(Front, config=config, metrics=metrics, open_to_all=tenants.open_to_all)
    return app


def _lifespan(gateway: Gateway) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.engine.start()
        keeping = asyncio.create_task(_keep_sessions(gateway.sessions), name="sessions")
        try:
            yield
        finally:
            gateway.sessions.stop_admitting()
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
            await gateway.engine.stop(0)

    return lifespan


async def _keep_sessions(session_manager: SessionManager) -> None:
    """Until cancelled. A defect in the housekeeping must not end the service: sessions then just
    stay hot until the engine itself drops them."""
    while True:
        try:
            await session_manager.run()
        except Exception:  # the edge of the process
            log.exception("the sessions' housekeeping failed; starting it again")
        await asyncio.sleep(RESTART_LOOP_S)
