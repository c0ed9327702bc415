"""POST /v1/responses/input_tokens: what a request would take, by the engine's own tokenizer."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.base import EngineUnavailable, SessionRef
from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json
from engines.openai.requests import checked, parse_json
from gateway.body import read_json_body
from gateway.context import Gateway, caller_of, gateway_of
from gateway.openai.lists import shown
from gateway.openai.responses.fields import ResponseFields
from gateway.openai.responses.history import context_of
from gateway.openai.responses.translation import translation, validate
from gateway.relay.passthrough import engine_failure

router = APIRouter()
TOKENIZE = "/tokenize"  # vLLM's path, and of engines that follow it
_COUNTED = ("model", "messages", "tools", "chat_template_kwargs")


class _Counted(msgspec.Struct, frozen=True):
    count: int


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of a request's whole input; nothing is answered or stored."""
    gateway, tenant = gateway_of(request), caller_of(request)
    asked = parse_json(await read_json_body(request, gateway.config) or b"{}")
    if asked.get("model") is None:
        asked["model"] = gateway.served.model
    fields = checked(asked, ResponseFields)
    context = await context_of(gateway.stored, tenant, fields)
    made = translation(fields, asked, context.past.items, context.own, False)
    validate(made.chat)
    session = gateway.session(tenant, "count")
    count = await _count(gateway, session, made.chat)
    return shown({"object": "response.input_tokens", "input_tokens": count})


@router.post("/v1/responses/compact")
async def compact(request: Request) -> Response:
    """Refuse: a summary would need a turn of its own."""
    caller_of(request)
    await read_json_body(request, gateway_of(request).config)
    message = "Conversations are not compacted here: have the client summarise them."
    raise InvalidRequest(message, None, "not_supported", 404)


async def _count(gateway: Gateway, session: SessionRef, chat: Json) -> int:
    raw = {name: chat[name] for name in _COUNTED if name in chat}
    raw["model"] = gateway.served.model
    headers = {
        **gateway.engine.session_headers(session),
        "content-type": "application/json",
    }
    body = msgspec.json.encode(raw)
    async with gateway.engine.open(TOKENIZE, body, headers) as upstream:
        said = await upstream.read()
    if upstream.status in (404, 405):
        message = "This engine does not count tokens."
        raise InvalidRequest(message, None, "not_supported", 404)
    if upstream.status >= 400:
        failure = engine_failure(upstream.status, said)
        raise InvalidRequest(failure.message, "input", failure.code, failure.status)
    try:
        return msgspec.json.decode(said, type=_Counted).count
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineUnavailable("its count cannot be read") from error
