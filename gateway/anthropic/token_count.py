"""POST /v1/messages/count_tokens: how many tokens the prompt of a message would have."""

from __future__ import annotations

from functools import partial

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.messages import BLIND, Sight
from engines.openai.requests import Json, checked, validate_chat
from gateway.anthropic.request import CountRequest
from gateway.anthropic.translation import prompt_fields
from gateway.body import body_for_engine
from gateway.config import GatewayConfig
from gateway.context import caller_of, gateway_of
from gateway.errors import ANTHROPIC_PATH
from gateway.models.served_model import ServedModel
from gateway.relay.prompt_count import count_question, prompt_tokens
from gateway.turns import served_name

router = APIRouter()


def chat_of(asked: Json, strip_attribution: bool, sight: Sight = BLIND) -> Json:
    """Translate a body into the chat whose tokens an engine is asked for.

    Raises:
        InvalidRequest: it is no request for a message.
    """
    request = checked(asked, CountRequest)
    fields, _ = prompt_fields(request, strip_attribution, sight)
    chat = {"model": request.model, **fields}
    validate_chat(chat, sight)
    return chat


async def count_tokens(request: Request) -> Response:
    """Answer with the number of tokens; nothing is computed or kept."""
    model, question = await _question(request)  # what was parsed is gone while the engine works
    counted = {"input_tokens": await prompt_tokens(request, model.engine, question)}
    return Response(msgspec.json.encode(counted), media_type="application/json")


async def _question(request: Request) -> tuple[ServedModel, bytes]:
    gateway = gateway_of(request)
    caller_of(request)
    check = partial(_check_early, gateway.config)
    async with body_for_engine(request, check=check) as body:
        made = await body.beside(partial(_for_engine, body.model, gateway.config, body.json))
        return body.model, made


def _check_early(config: GatewayConfig, model: ServedModel, asked: Json) -> None:
    chat_of(asked, config.strip_attribution, model.last_sight)


def _for_engine(model: ServedModel, config: GatewayConfig, asked: Json) -> bytes:
    chat = chat_of(asked, config.strip_attribution, model.sight)
    chat["model"] = served_name(model, config, chat["model"])
    return count_question(model.served.template, config.keep_reasoning, chat)


router.add_route(f"{ANTHROPIC_PATH}/count_tokens", count_tokens, methods=["POST"])
