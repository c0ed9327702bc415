"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.errors import unknown_model
from gateway.config import ANY_MODEL
from gateway.context import Gateway, caller_of, gateway_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    caller_of(request)
    gateway = gateway_of(request)
    aliases = [x for x in gateway.config.model_aliases if x != ANY_MODEL]
    models = [_model(gateway, name) for name in (gateway.served.model, *aliases)]
    # Codex wants a catalogue of its own as well; from an empty one it learns nothing wrong.
    return _json({"object": "list", "data": models, "models": []})


@router.get("/v1/models/{name:path}")  # hub ids have slashes
async def show_model(request: Request) -> Response:
    caller_of(request)
    gateway = gateway_of(request)
    name = request.path_params["name"]
    if not gateway.config.means_served(name, gateway.served.model):
        raise unknown_model(name[:100], gateway.served.model)
    return _json(_model(gateway, name))


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(gateway.started_at, UTC)
    return {
        "id": name,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "thermocline",
        "max_model_len": gateway.served.max_context,
        # Anthropic's names for the same, for its clients.
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": gateway.served.max_context,
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
