"""POST /v1/responses/input_tokens: what a request would take, by the engine's own tokenizer."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.errors import InvalidRequest
from engines.openai.requests import Json, checked
from gateway.body import body_for_engine
from gateway.context import caller_of, gateway_of
from gateway.models.served_model import ServedModel
from gateway.openai.lists import shown
from gateway.openai.responses.fields import ResponseFields
from gateway.openai.responses.history import context_of
from gateway.openai.responses.translation import Known, translation, validate
from gateway.relay.prompt_count import count_question, prompt_tokens

router = APIRouter()


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of a request's whole input; nothing is answered or stored."""
    model, question = await _question(request)  # what was parsed is gone while the engine works
    try:
        count = await prompt_tokens(request, model.engine, question)
    except InvalidRequest as error:  # the engine's words are of a chat
        raise InvalidRequest(error.message, "input", error.code, error.status) from error
    return shown({"object": "response.input_tokens", "input_tokens": count})


async def _question(request: Request) -> tuple[ServedModel, bytes]:
    gateway, tenant = gateway_of(request), caller_of(request)
    async with body_for_engine(request, empty=b"{}") as body:
        if body.json.get("model") is None:
            body.json["model"] = body.model.served.model
        fields = await body.beside(lambda: checked(body.json, ResponseFields))
        context = await context_of(gateway.stored, tenant, fields, body)
        known = Known(gateway.sealed_texts(tenant).open, body.model.sight)
        asked = partial(translation, fields, body.json, context, known)
        keeps = gateway.config.keep_reasoning
        made = await body.beside(lambda: _for_engine(body.model, keeps, asked().chat, known))
        return body.model, made


def _for_engine(model: ServedModel, keeps_reasoning: bool, chat: Json, known: Known) -> bytes:
    validate(chat, known.sight)
    chat["model"] = model.served.model
    return count_question(model.served.template, keeps_reasoning, chat)
