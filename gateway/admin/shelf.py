"""/admin/models: loads and unloads served models; downloads, lists and deletes models on disk.

The settings say which models a server serves. A model that is downloaded here lies in the cache of
the hub client, and is served once the settings name it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from engines.base import HasReplicas
from engines.openai.requests import InvalidRequest
from engines.pool.hub_cache import HubRefusal
from engines.pool.loading import Loading
from engines.pool.on_demand import OnDemand
from gateway.admin.routes import answer, for_admin
from gateway.gateway import Gateway
from gateway.models import ServedModel
from gateway.request.body import read_json_body
from gateway.request.callers import admin_of, gateway_of
from gateway.request.routing import new_router, takes

router = new_router()


class ModelBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request about a model: its name, or its id at the hub."""

    model: str


@router.get("/admin/models")
async def show_shelf(request: Request) -> Response:
    """Show the models that are served, and the last download."""
    gateway = for_admin(request)
    rows = [_row(gateway, x) for x in gateway.models]
    return answer({"object": "list", "data": rows, "download": gateway.hub.download})


@router.get("/admin/models/cached")
async def show_cached(request: Request) -> Response:
    """List the models in the hub client's cache; ``problem`` says why they cannot be listed."""
    gateway = for_admin(request)
    cached = await gateway.hub.listed()
    rows = [
        {**structs.asdict(x), "served_as": _served_as(gateway, x.id, x.folder)}
        for x in cached.models
    ]
    about = {"free_bytes": cached.free_bytes, "problem": cached.problem}
    return answer({"object": "list", "data": rows, **about})


@router.post("/admin/models/load", openapi_extra=takes(ModelBody))
async def load_model(request: Request) -> Response:
    """Begin to load a model that is loaded on demand."""
    caller = admin_of(request)
    gateway, model, on_demand, loading = await _on_demand(request)
    loading.load(on_demand, caller.name)
    await asyncio.sleep(0)  # so that the answer shows the model in the line of loads
    return answer(_row(gateway, model), 202)


@router.post("/admin/models/unload", openapi_extra=takes(ModelBody))
async def unload_model(request: Request) -> Response:
    """Begin to unload a model that is loaded on demand, or cancel its load if that still waits.

    The model's sessions are saved first.
    """
    gateway, model, on_demand, loading = await _on_demand(request)
    if not (loading.take_back(on_demand) or loading.unload(on_demand)):
        if on_demand.num_uses:
            message = f"{on_demand.num_uses} requests use {model.label} now."
            raise InvalidRequest(message, None, "model_in_use", 409)
        raise InvalidRequest(f"{model.label} is {model.state}.", None, "model_not_loaded", 409)
    return answer(_row(gateway, model), 202)


@router.post("/admin/models/download", openapi_extra=takes(ModelBody))
async def download_model(request: Request) -> Response:
    """Begin to download a model from the hub; the list of models shows the progress."""
    gateway = for_admin(request)
    try:
        return answer(gateway.hub.begin(await _name(request)), 202)
    except HubRefusal as error:
        message = f"Nothing is downloaded: {error}."
        raise InvalidRequest(message, None, "not_downloaded", 409) from error


@router.delete("/admin/models/download")
async def stop_download(request: Request) -> Response:
    """Stop the download; its partial files stay, and a later download continues from them."""
    gateway = for_admin(request)
    await gateway.hub.stop()
    return answer(gateway.hub.download)


@router.delete("/admin/models/cached/{name:path}")
async def delete_model(request: Request) -> Response:
    """Delete a model from the hub client's cache, unless the settings name it."""
    gateway, name = for_admin(request), str(request.path_params["name"])
    cached = await gateway.hub.listed()
    found = next((x for x in cached.models if x.id == name), None)
    if found is None:
        raise InvalidRequest("There is no such model in the cache.", "name", "model_not_found", 404)
    if served_as := _served_as(gateway, name, found.folder):
        message = f"This server serves it as {served_as}. Take it out of the settings first."
        raise InvalidRequest(message, None, "model_in_use", 409)
    try:
        freed = await gateway.hub.delete(name)
    except HubRefusal as error:
        message = f"Nothing was deleted: {error}."
        raise InvalidRequest(message, None, "not_deleted", 409) from error
    return answer({"id": name, "object": "model", "deleted": True, "freed_bytes": freed})


async def _name(request: Request) -> str:
    body = await read_json_body(request, gateway_of(request).config)
    try:
        return msgspec.json.decode(body or b"{}", type=ModelBody).model
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is {{'model': NAME}}: {error}.", "model") from error


async def _on_demand(request: Request) -> tuple[Gateway, ServedModel, OnDemand, Loading]:
    """Find the model that a body names. Raises ``InvalidRequest`` (409) if it is always loaded."""
    gateway = for_admin(request)
    model = gateway.models.named(await _name(request), gateway.config)
    if model.on_demand is None or gateway.loading is None:
        message = f"{model.label} is always loaded; see load = 'on-demand' of [[engines]]."
        raise InvalidRequest(message, None, "always_loaded", 409)
    return gateway, model, model.on_demand, gateway.loading


def _row(gateway: Gateway, model: ServedModel) -> dict[str, Any]:
    on_demand, loading, engine = model.on_demand, gateway.loading, model.engine
    said, in_use, is_queued, displaced = model.trouble, 0, False, None
    if on_demand is not None and loading is not None:
        in_use, is_queued = on_demand.num_uses, loading.is_queued(on_demand)
        displaced = loading.displaces(on_demand)
        is_moving = on_demand.waiting or model.state in ("loading", "unloading")
        said = loading.progress(on_demand) if is_moving else on_demand.failed or said
    return {
        "name": model.label,
        "aliases": model.aliases,
        "state": model.state,
        "on_demand": on_demand is not None,
        "said": said,
        "in_use": in_use,
        "queued": is_queued,
        "displaces": displaced.name if displaced else None,
        "weights_bytes": model.weights_bytes,
        "held_bytes": model.held_bytes if engine.ready else 0,
        "num_sessions": len(model.sessions.table),
        "replicas": engine.replicas if isinstance(engine, HasReplicas) else (),
    }


def _served_as(gateway: Gateway, name: str, folder: str) -> str:
    """Return the name of the model that is served from there; "" if none is.

    Either path may lead there over links, as where the cache's folder is on another disk.
    """
    real = os.path.realpath(folder)
    for model in gateway.models:
        paths = [Path(model.path), Path(os.path.realpath(model.path))] if model.path else []
        if model.path == name or any(x.is_relative_to(y) for x in paths for y in (folder, real)):
            return model.label or name
    return ""
