"""POST /v1/embeddings: passed to engines that make them, under the limits of the caller's key.

It is no turn: it has no session, and nothing of it is kept.
"""

from __future__ import annotations

from functools import partial

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.embeddings import EMBEDDINGS_PATH, validate_embeddings
from engines.openai.requests import Json
from gateway.body import body_for_engine
from gateway.config import GatewayConfig
from gateway.context import caller_of, gateway_of
from gateway.edge.body_budget import body_share_of
from gateway.limits.key_limits import key_share_of
from gateway.models.served_model import ServedModel
from gateway.relay.question import answer_to
from gateway.relay.sse_framer import parse_usage
from gateway.turns import served_name

router = APIRouter()
_OPERATION = "embeddings"  # OpenTelemetry's name
_TAKEN = ("input", "encoding_format", "dimensions")


async def embeddings(request: Request) -> Response:
    """Embed texts, or token ids, with the served model."""
    model, answer = await _answer(request)
    body_share_of(request.scope).give_back()  # the question is gone
    if usage := parse_usage(answer):
        welcome = model.engine.welcome  # it may be gone by now
        gateway_of(request).metrics.used(_OPERATION, welcome.model if welcome else "", usage)
        if place := key_share_of(request.scope):
            place.used_tokens(usage.prompt_tokens)
    return Response(answer, media_type="application/json")


async def _answer(request: Request) -> tuple[ServedModel, bytes]:
    """Ask the engine. The question is held until the answer is there, and counts for so long."""
    model, question = await _question(request)
    limit_s = gateway_of(request).config.request_timeout_s
    return model, await answer_to(request, model.engine, EMBEDDINGS_PATH, question, limit_s)


async def _question(request: Request) -> tuple[ServedModel, bytes]:
    caller_of(request)
    config = gateway_of(request).config
    async with body_for_engine(request, check=_check_early) as body:
        made = await body.beside(partial(_for_engine, body.model, config, body.json))
        return body.model, made


def _check_early(model: ServedModel, raw: Json) -> None:
    validate_embeddings(raw)


def _for_engine(model: ServedModel, config: GatewayConfig, raw: Json) -> bytes:
    name = served_name(model, config, validate_embeddings(raw).model)
    question = {name: raw[name] for name in _TAKEN if raw.get(name) is not None}
    return msgspec.json.encode({**question, "model": name})


router.add_route(EMBEDDINGS_PATH, embeddings, methods=["POST"])
