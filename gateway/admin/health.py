"""GET /livez, /readyz, /metrics, /version and their like: for the server's operators."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import Gateway, caller_of, gateway_of
from gateway.errors import Failure

router = APIRouter()
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/livez")
async def livez(request: Request) -> Response:
    """Answer that this process lives; a restart of it would not cure the engine's troubles."""
    return _json({"status": "alive"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Answer 200 while turns of some model that is always loaded are taken, else 503."""
    gateway = gateway_of(request)
    if gateway.draining:
        return Failure(503, "This server is shutting down.", None, "draining").response()
    always = [x for x in gateway.models if x.on_demand is None]
    troubles = [model.trouble for model in always or gateway.models]
    if all(troubles):
        return Failure(503, troubles[0], None, "engine_unavailable").response()
    taking = [x for x in gateway.models if not x.trouble]
    model = next((x for x in taking if x.engine.ready), taking[0])
    model.sessions.headroom.admit()
    served = model.engine.welcome
    about: dict[str, object] = {
        "status": "ready",
        "engine": served.engine if served else None,
        "model": model.name,
        "hibernation": served.hibernation if served else None,
        "reason": served.hibernation_reason if served else "",
    }
    if len(gateway.models) > 1:
        about["models"] = {x.label: x.trouble or x.state for x in gateway.models}
    return _json(about)


@router.get("/health")
@router.get("/ping")
async def health(request: Request) -> Response:
    """Answer as /readyz does, under the names that engines and clouds ask."""
    return await readyz(request)


@router.get("/version")
async def show_version(request: Request) -> Response:
    """Answer with the version of this server."""
    return _json({"version": version("thermocline")})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Answer with all counters and gauges in Prometheus' text format."""
    gateway = gateway_of(request)
    if _metrics_need_key(gateway):
        caller_of(request)
    gauges = await asyncio.gather(*(x.gauges() for x in gateway.models))
    text = gateway.metrics.render(*gauges)
    return Response(text, media_type=PROMETHEUS_TEXT)


def _metrics_need_key(gateway: Gateway) -> bool:
    access = gateway.config.metrics_access
    if access == "auto":
        return not gateway.config.on_loopback and not gateway.tenants.open_to_all
    return access == "key"


def _json(body: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
