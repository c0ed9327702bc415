"""POST /v1/chat/completions and /v1/completions: what engines speak themselves."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.requests import validate_chat, validate_completion
from gateway.turns import Operation, accept

router = APIRouter()

CHAT = Operation("chat", "/v1/chat/completions", validate_chat, lambda raw: raw["messages"])
TEXT = Operation(
    "text_completion", "/v1/completions", validate_completion, lambda raw: [raw["prompt"]]
)


async def chat_completions(request: Request) -> Response:
    return await accept(request, CHAT)


async def completions(request: Request) -> Response:
    return await accept(request, TEXT)


# Plain routes: FastAPI's own resolve dependencies, which nobody here has, for every request.
router.add_route(CHAT.path, chat_completions, methods=["POST"])
router.add_route(TEXT.path, completions, methods=["POST"])
