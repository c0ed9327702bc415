"""Routes for operators (/livez, /readyz, /metrics) and admins: keys, log lines, measurements.

A key is shown once, when it is made; the list of keys shows ids and limits, never a hash.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.json_bodies import decoded
from engines.openai.requests import InvalidRequest
from gateway.edge.key_list import KeyListFixed
from gateway.errors import Failure
from gateway.gateway import Gateway
from gateway.keys import BadKeyLine, Key, Limits, generate_key, read_key
from gateway.request.body import read_json_body
from gateway.request.callers import admin_of, charged_caller, gateway_of, model_asked
from gateway.request.routing import json_response, new_router, takes

router = new_router()
log = logging.getLogger("thermocline.admin")
T = TypeVar("T")
USUAL_LINES = 200
MOST_LINES = 2000
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def for_admin(request: Request) -> Gateway:
    """Return the app's parts. Raises ``InvalidRequest`` (401, 403) if the caller is no admin."""
    admin_of(request)
    return gateway_of(request)


def answer(body: Any, status: int = 200) -> Response:
    return Response(
        msgspec.json.encode(body),
        status,
        {"cache-control": "no-store"},
        media_type="application/json",
    )


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for a new key: its tenant and its limits.

    None: the usual limit of ``gateway.key_limits``; 0: no limit.
    """

    tenant: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    sessions: int | None = None
    ram_bytes: int | None = None
    disk_bytes: int | None = None


_new_keys = msgspec.json.Decoder(NewKey)


@router.get("/admin/keys")
async def list_keys(request: Request) -> Response:
    """List the API keys by their ids, with their limits."""
    gateway = for_admin(request)
    found = await _changed(gateway.keys.listed)
    return answer({"object": "list", "data": [_shown(x, where) for x, where in found]})


@router.post("/admin/keys", openapi_extra=takes(NewKey))
async def make_key(request: Request) -> Response:
    """Make an API key; this answer is the only one that shows it."""
    gateway = for_admin(request)
    body = await read_json_body(request, gateway.config)
    wanted = decoded(body or b"{}", _new_keys)
    try:
        key, line = generate_key(wanted.tenant)
        line += _words(wanted)
        made = read_key(line)
    except BadKeyLine as error:
        raise InvalidRequest(
            "'tenant' has up to 64 letters, digits, '.', '_' and '-' and begins with a letter or"
            " digit; limits are numbers from 0 on.",
            "tenant",
        ) from error
    await _changed(lambda: gateway.keys.add(line))
    log.info("a key of tenant %s was made: %s", made.tenant, made.id)
    return answer({**_shown(made, "file"), "key": key}, 201)


@router.delete("/admin/keys/{key_id}")
async def revoke_key(request: Request) -> Response:
    """Revoke an API key, from the next request on."""
    gateway, key_id = for_admin(request), str(request.path_params["key_id"])
    if not await _changed(lambda: gateway.keys.revoke(key_id)):
        raise InvalidRequest("There is no such key.", "key_id", "key_not_found", 404)
    log.info("a key was revoked: %s", key_id)
    return answer({"id": key_id, "object": "key.deleted", "deleted": True})


async def _changed(change: Callable[[], T]) -> T:
    """Run ``change``, which reads or writes the key file, on a thread; return its result.

    Raises:
        InvalidRequest: 409, the list cannot be changed like this; 503, its file cannot be read or
            written.
    """
    try:
        return await asyncio.to_thread(change)
    except KeyListFixed as error:
        raise InvalidRequest(str(error), None, "keys_fixed", 409) from error
    except BadKeyLine as error:
        message = f"Nothing was changed: {error}."
        raise InvalidRequest(message, None, "bad_key", 409) from error
    except (OSError, UnicodeDecodeError) as error:
        message = f"The file of API keys cannot be read or written: {error}. Nothing was changed."
        raise InvalidRequest(message, None, "key_file", 503) from error


def _words(wanted: NewKey) -> str:
    given = {name: getattr(wanted, name) for name in Limits._fields}
    return "".join(f" {name}={number}" for name, number in given.items() if number is not None)


def _shown(key: Key, where: str) -> dict[str, object]:
    return {
        "object": "key",
        "id": key.id,
        "tenant": key.tenant,
        "admin": key.admin,
        "limits": key.limits._asdict() if key.limits else None,
        "kept_in": where,
    }


@router.get("/admin/log")
async def show_log(request: Request) -> Response:
    """Show the last lines of the log, or those since the line whose number is ``after``."""
    gateway = for_admin(request)
    after = _number(request, "after", 0, 1 << 53)
    limit = _number(request, "limit", USUAL_LINES, MOST_LINES)
    lines = gateway.log_ring.lines(after, limit) if limit else []
    return answer({"object": "list", "data": lines, "last": lines[-1].n if lines else after})


def _number(request: Request, name: str, usual: int, most: int) -> int:
    given = request.query_params.get(name, str(usual))
    if not given.isdecimal() or len(given) > 16 or int(given) > most:
        raise InvalidRequest(f"'{name}' is a number from 0 to {most}.", name)
    return int(given)


@router.post("/admin/measure")
async def measure(request: Request) -> Response:
    """Begin to measure the loss of each codec on this model; events report the progress."""
    gateway = for_admin(request)
    await read_json_body(request, gateway.config)
    model = model_asked(request) or gateway.models.default
    if not model.served.can_measure:
        message = "This engine cannot measure on request. Run `thermocline calibrate` instead."
        raise InvalidRequest(message, None, "cannot_measure", 409)
    codec = await model.engine.measure()
    return answer({"object": "measurement", "progress": codec.progress, "codec": codec.name}, 202)


@router.get("/livez")
async def livez(request: Request) -> Response:
    """Answer 200 as long as this process runs, whatever state its engines are in."""
    return json_response({"status": "alive"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Answer 200 while a model that is always loaded takes turns, else 503."""
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
    return json_response(about)


@router.get("/health")
@router.get("/ping")
async def health(request: Request) -> Response:
    """Answer as /readyz does, under the names that engines and cloud services use."""
    return await readyz(request)


@router.get("/version")
async def show_version(request: Request) -> Response:
    """Answer with the version of this server."""
    return json_response({"version": version("thermocline")})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Answer with all counters and gauges in the text format of Prometheus."""
    gateway = gateway_of(request)
    if _metrics_need_key(gateway):
        charged_caller(request)
    gauges = await asyncio.gather(*(x.gauges() for x in gateway.models))
    text = gateway.metrics.render(*gauges)
    return Response(text, media_type=PROMETHEUS_TEXT)


def _metrics_need_key(gateway: Gateway) -> bool:
    access = gateway.config.metrics_access
    if access == "auto":
        return not gateway.config.on_loopback and not gateway.tenants.open_to_all
    return access == "key"
