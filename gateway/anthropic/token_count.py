"""POST /v1/messages/count_tokens: how many tokens the prompt of a message would have."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.requests import Json, checked, parse_json, validate_chat
from gateway.anthropic.request import CountRequest
from gateway.anthropic.translation import prompt_fields
from gateway.body import read_json_body
from gateway.context import caller_of, gateway_of
from gateway.errors import ANTHROPIC_PATH
from gateway.relay.prompt_count import prompt_tokens
from gateway.turns import beside, served_name

router = APIRouter()


def chat_of(body: bytes, strip_attribution: bool) -> Json:
    """Translate a body into what an engine is asked for the tokens of.

    Raises:
        InvalidRequest: it is no request for a message.
    """
    request = checked(parse_json(body), CountRequest)
    fields, _ = prompt_fields(request, strip_attribution)
    chat = {"model": request.model, **fields}
    validate_chat(chat)
    return chat


async def count_tokens(request: Request) -> Response:
    """Answer with the number of tokens; nothing is computed or kept."""
    gateway = gateway_of(request)
    caller_of(request)
    await gateway.served_soon()
    body = await read_json_body(request, gateway.config)
    chat = await beside(body, lambda: chat_of(body, gateway.config.strip_attribution))
    chat["model"] = served_name(gateway, chat["model"])
    counted = {"input_tokens": await prompt_tokens(gateway, chat)}
    return Response(msgspec.json.encode(counted), media_type="application/json")


router.add_route(f"{ANTHROPIC_PATH}/count_tokens", count_tokens, methods=["POST"])
