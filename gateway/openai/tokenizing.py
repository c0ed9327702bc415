"""POST /tokenize and /detokenize, in vLLM's schema: the tokens of a chat or a text, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.requests import Json, parse_json
from engines.openai.tokenizing import (
    DETOKENIZE_PATH,
    TOKENIZE_PATH,
    validate_detokenize,
    validate_tokenize,
)
from gateway.body import read_json_body
from gateway.context import caller_of, gateway_of
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


async def _ask(request: Request, path: str, validate: Callable[[Json], Any]) -> Response:
    gateway = gateway_of(request)
    caller_of(request)
    await gateway.served_soon()
    raw = parse_json(await read_json_body(request, gateway.config))
    raw.setdefault("model", gateway.served.model)  # optional, as in vLLM
    model = served_name(gateway, validate(raw).model)
    question = {name: raw[name] for name in _TAKEN & raw.keys()}
    answer = await answer_to(gateway.engine, path, {**question, "model": model})
    return Response(answer, media_type="application/json")


router.add_route(TOKENIZE_PATH, tokenize, methods=["POST"])
router.add_route(DETOKENIZE_PATH, detokenize, methods=["POST"])
