"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.base import HasReplicas
from gateway.config import ANY_MODEL
from gateway.context import Gateway, caller_of, gateway_of, sees_all
from gateway.models.served_model import ServedModel

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    with_replicas = sees_all(request, caller_of(request))
    gateway = gateway_of(request)
    aliases = [x for x in gateway.config.model_aliases if x != ANY_MODEL]
    named = [(x, name) for x in gateway.models for name in (x.name, *x.aliases)]
    named += [(gateway.models.default, name) for name in aliases]
    models = [_model(gateway, *x, with_replicas) for x in named]
    # Codex wants a catalogue of its own as well; from an empty one it learns nothing wrong.
    return _json({"object": "list", "data": models, "models": []})


@router.get("/v1/models/{name:path}")  # hub ids have slashes
async def show_model(request: Request) -> Response:
    with_replicas = sees_all(request, caller_of(request))
    gateway = gateway_of(request)
    name = request.path_params["name"]
    model = gateway.models.named(name, gateway.config)
    return _json(_model(gateway, model, name, with_replicas))


def _model(gateway: Gateway, model: ServedModel, name: str, with_replicas: bool) -> dict[str, Any]:
    """Describe a model; its replicas, which have addresses and troubles, to admins only."""
    welcome = model.engine.welcome or model.seen
    max_context = welcome.max_context if welcome else None  # until it was loaded once
    created = datetime.fromtimestamp(gateway.started_at, UTC)
    engine = model.engine
    replicas = {}
    if with_replicas and isinstance(engine, HasReplicas):
        replicas = {"replicas": engine.replicas}
    return {
        "id": name,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "thermocline",
        "max_model_len": max_context,
        "root": model.name,
        "state": model.state,
        "engine": welcome.engine if welcome else None,
        **replicas,
        # Anthropic's names for the same, for its clients.
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_context,
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
