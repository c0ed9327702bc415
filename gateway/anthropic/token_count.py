"""POST /v1/messages/count_tokens: how many tokens the prompt of a message would have."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.requests import Json, checked, parse_json, validate_chat
from engines.openai.tokenizing import TOKENIZE_PATH
from gateway.anthropic.request import CountRequest
from gateway.anthropic.translation import prompt_fields
from gateway.body import read_json_body
from gateway.context import caller_of, gateway_of
from gateway.errors import ANTHROPIC_PATH
from gateway.relay.question import answer_to
from gateway.turns import beside, served_name

router = APIRouter()


class _Counted(msgspec.Struct, frozen=True):
    count: int


def chat_of(body: bytes, strip_attribution: bool) -> Json:
    """Translate a body into what an engine is asked for the tokens of.

    Raises:
        InvalidRequest: it is no request for a message.
    """
    request = checked(parse_json(body), CountRequest)
    fields, _ = prompt_fields(request, strip_attribution)
    chat = {"model": request.model, **fields}
    validate_chat(chat)
    for name in ("tool_choice", "parallel_tool_calls", "response_format"):
        chat.pop(name, None)  # no part of the prompt
    effort = chat.get("reasoning_effort")
    if effort is not None:  # vLLM looks for it here when it only tokenizes
        switches = {"reasoning_effort": effort, **chat.get("chat_template_kwargs", {})}
        chat["chat_template_kwargs"] = switches
    return chat


async def count_tokens(request: Request) -> Response:
    """Answer with the number of tokens; nothing is computed or kept."""
    gateway = gateway_of(request)
    caller_of(request)
    await gateway.served_soon()
    body = await read_json_body(request, gateway.config)
    chat = await beside(body, lambda: chat_of(body, gateway.config.strip_attribution))
    chat["model"] = served_name(gateway, chat["model"])
    answer = await answer_to(gateway.engine, TOKENIZE_PATH, chat)
    counted = msgspec.json.decode(answer, type=_Counted)
    return Response(
        msgspec.json.encode({"input_tokens": counted.count}), media_type="application/json"
    )


router.add_route(f"{ANTHROPIC_PATH}/count_tokens", count_tokens, methods=["POST"])
