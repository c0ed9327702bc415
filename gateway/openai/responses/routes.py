"""POST /v1/responses."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.messages import Json
from gateway.context import Gateway
from gateway.keys import Tenant
from gateway.openai.responses.translation import translation, validate
from gateway.turns import Operation, Translate, Translated, accept

router = APIRouter()


async def _recall(gateway: Gateway, tenant: Tenant, asked: Json) -> Translate:
    if asked.get("model") is None:
        asked["model"] = gateway.served.model
    return partial(_translate, gateway)


def _translate(gateway: Gateway, asked: Json) -> Translated:
    made = translation(asked, ())
    gateway.metrics.skipped(made.skipped)
    return Translated(made.chat, made.answer)


RESPONSE = Operation(
    "chat", "/v1/chat/completions", validate, lambda raw: raw["messages"], recall=_recall
)


async def create_response(request: Request) -> Response:
    return await accept(request, RESPONSE)


router.add_route("/v1/responses", create_response, methods=["POST"])
