"""POST /tokenize and /detokenize, in vLLM's schema: the tokens of a chat or a text, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.errors import context_too_long
from engines.openai.messages import Sight, with_known_parts
from engines.openai.requests import (
    DETOKENIZE_PATH,
    MAX_CONTEXTS,
    TOKENIZE_PATH,
    ChatRequest,
    Detokenize,
    Json,
    validate_detokenize,
    validate_tokenize,
)
from gateway.body import body_for_engine
from gateway.config import GatewayConfig
from gateway.context import caller_of, gateway_of
from gateway.models.served_model import ServedModel
from gateway.relay.question import answer_to
from gateway.turns import served_name

router = APIRouter()

# Fields that reach an engine; a client's own chat template would be code that we run.
_TAKEN = frozenset(
    {"messages", "tools", "chat_template_kwargs", "reasoning_effort", "prompt", "tokens"}
    | {"add_special_tokens", "return_token_strs"}
)


async def tokenize(request: Request) -> Response:
    return await _ask(request, TOKENIZE_PATH, validate_tokenize)


async def detokenize(request: Request) -> Response:
    return await _ask(request, DETOKENIZE_PATH, validate_detokenize)


async def _ask(request: Request, path: str, validate: Callable[[Json, Sight], Any]) -> Response:
    # The parsed body is gone while the engine works.
    model, question = await _question(request, validate)
    answer = await answer_to(request, model.engine, path, question)
    return Response(answer, media_type="application/json")


async def _question(
    request: Request, validate: Callable[[Json, Sight], Any]
) -> tuple[ServedModel, bytes]:
    caller_of(request)
    config = gateway_of(request).config
    check = partial(_check_early, validate)
    async with body_for_engine(request, check=check) as body:
        made = await body.beside(partial(_for_engine, body.model, config, validate, body.json))
        return body.model, made


def _check_early(validate: Callable[[Json, Sight], Any], model: ServedModel, raw: Json) -> None:
    raw.setdefault("model", model.label)
    validate(raw, model.last_sight)


def _for_engine(
    model: ServedModel, config: GatewayConfig, validate: Callable[[Json, Sight], Any], raw: Json
) -> bytes:
    raw.setdefault("model", model.served.model)  # optional, as in vLLM
    asked = validate(raw, model.sight)
    if isinstance(asked, Detokenize) and len(asked.tokens) > (
        MAX_CONTEXTS * model.served.max_context
    ):
        raise context_too_long(model.served.max_context, len(asked.tokens), "tokens")
    question = {name: raw[name] for name in _TAKEN & raw.keys()}
    if isinstance(asked, ChatRequest):
        question["messages"] = with_known_parts(raw["messages"], asked.messages)
    return msgspec.json.encode({**question, "model": served_name(model, config, asked.model)})


router.add_route(TOKENIZE_PATH, tokenize, methods=["POST"])
router.add_route(DETOKENIZE_PATH, detokenize, methods=["POST"])
