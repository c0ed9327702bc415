"""POST /v1/responses, and what can be done with a response that was stored."""

from __future__ import annotations

from functools import partial

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.base import SessionRef
from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json
from gateway.body import read_json_body
from gateway.context import Gateway, gateway_of
from gateway.identity.retention import asked_seconds
from gateway.keys import Tenant
from gateway.openai.lists import shown
from gateway.openai.responses.answer import ResponseAnswer
from gateway.openai.responses.event_writer import EventWriter
from gateway.openai.responses.fields import ResponseFields
from gateway.openai.responses.history import Context, keep_response, recalled
from gateway.openai.responses.replay import replayed
from gateway.openai.responses.translation import Known, translation, validate
from gateway.openai.stored_objects import StoredKind
from gateway.relay.passthrough import EVENT_STREAM
from gateway.turns import Operation, Translate, Translated, accept

router = APIRouter()
_ONE = "/v1/responses/{response_id}"
RESPONSES = StoredKind("response", "Response with id", "response")


async def _recall(gateway: Gateway, tenant: Tenant, asked: Json) -> Translate:
    fields, context = await recalled(gateway, tenant, asked)
    return partial(_translate, gateway, tenant, fields, context)


def _translate(
    gateway: Gateway, tenant: Tenant, fields: ResponseFields, context: Context, asked: Json
) -> Translated:
    stores = fields.stores and gateway.stored.enabled
    known = Known(gateway.sealed_texts(tenant).open, gateway.sight)
    made = translation(fields, asked, context, known, stores)
    keep = None
    if stores or fields.conversation_id:
        keep = partial(_keep, gateway, fields, context.own, made.answer)
    return Translated(made.chat, made.answer, keep, made.skipped, asked_seconds(asked))


async def _keep(
    gateway: Gateway,
    fields: ResponseFields,
    own: list[Json],
    answer: ResponseAnswer,
    session: SessionRef,
) -> None:
    if answer.response is not None:
        await keep_response(gateway.stored, fields, own, answer.response, session)


RESPONSE = Operation(
    "chat", "/v1/chat/completions", validate, lambda raw: raw["messages"], recall=_recall
)


async def create_response(request: Request) -> Response:
    return await accept(request, RESPONSE)


router.add_route("/v1/responses", create_response, methods=["POST"])


@router.get(_ONE)
async def show_response(request: Request) -> Response:
    """Show a stored response; ``stream`` as events, from behind ``starting_after`` on."""
    entry = await RESPONSES.entry(request)
    if request.query_params.get("stream", "").lower() != "true":
        return shown(entry.body)
    after = request.query_params.get("starting_after") or "-1"
    if not after.removeprefix("-").isdecimal() or len(after) > 9:
        raise InvalidRequest("starting_after: a number is needed", "starting_after")
    events = replayed(msgspec.json.decode(entry.body))
    return Response(EventWriter().write(events, int(after)), media_type=EVENT_STREAM)


@router.delete(_ONE)
async def delete_response(request: Request) -> Response:
    """Remove a stored response, for good."""
    return await RESPONSES.delete(request)


@router.get(_ONE + "/input_items")
async def list_input_items(request: Request) -> Response:
    """List the items that a stored response was asked with, its own turn's."""
    return await RESPONSES.list_items(request, ascending=False)


@router.post(_ONE + "/cancel")
async def cancel_response(request: Request) -> Response:
    """Refuse: only background responses can be cancelled, and there are none here."""
    gateway = gateway_of(request)
    entry = await RESPONSES.entry(request)
    await read_json_body(request, gateway.config)
    message = f"Response {entry.id} is no background response: end its connection to cancel it."
    raise InvalidRequest(message, "response_id", "not_cancellable")
