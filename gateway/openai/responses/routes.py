"""POST /v1/responses and /v1/responses/input_tokens, and the routes of a stored response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.base import SessionRef
from engines.openai.errors import InvalidRequest
from engines.openai.foreign_request import Dialect
from engines.openai.messages import ImageSupport
from engines.openai.requests import HELD_TO_NOTHING, Json, checked
from gateway.errors import Failure
from gateway.gateway import Gateway
from gateway.identity.names import asked_seconds
from gateway.keys import Tenant
from gateway.models import ServedModel
from gateway.openai.responses.history import (
    Context,
    KeptTurn,
    context_of,
    full_items,
    keep_response,
    recalled,
    rows_of,
)
from gateway.openai.responses.response import ResponseFields
from gateway.openai.responses.translation import (
    RENAMED,
    EventWriter,
    ResponseAnswer,
    translation,
    validate,
)
from gateway.openai.stored_objects import StoredKind
from gateway.relay.answer import NotStored
from gateway.relay.passthrough import EVENT_STREAM, STREAM_HEADERS
from gateway.relay.question import count_question, prompt_tokens
from gateway.request.body import ParsedBody, body_for_engine, read_json_body
from gateway.request.callers import charged_caller, gateway_of, state_of
from gateway.request.routing import json_response, new_router, takes
from gateway.turns import Operation, Translate, Translated, accept

router = new_router()
_ONE = "/v1/responses/{response_id}"
_REPLAYED = 4  # times that its events repeat a response: created, in progress, deltas, completed
RESPONSES = StoredKind("response", "Response with id", "response")
_EVENTS = {"output_text": "response.output_text", "reasoning_text": "response.reasoning_text"}
# The field with the text of a call that a model writes, and the event for it.
_WRITTEN = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}


async def _recall(gateway: Gateway, tenant: Tenant, body: ParsedBody) -> Translate:
    fields, context = await recalled(gateway, tenant, body)
    return partial(_translate, gateway, body.model.image_support, fields, context)


def _translate(
    gateway: Gateway,
    image_support: ImageSupport,
    fields: ResponseFields,
    context: Context,
    asked: Json,
) -> Translated:
    stores = fields.stores and gateway.stored.enabled
    made = translation(fields, asked, context, image_support, stores)
    keep = None
    if stores or fields.conversation_id:
        # Encoded now: as objects they would take many times the memory while the engine computes.
        turn = KeptTurn(fields.conversation_id, fields.stores, rows_of(full_items(context.own)))
        keep = partial(_keep, gateway, turn, made.answer)
    return Translated(made.chat, made.answer, keep, made.skipped, asked_seconds(asked))


async def _keep(
    gateway: Gateway,
    turn: KeptTurn,
    answer: ResponseAnswer,
    session: SessionRef,
    is_deleted: Callable[[], bool],
) -> NotStored | None:
    if answer.response is None:
        return None
    why = await keep_response(gateway.stored, turn, answer.response, session, is_deleted)
    return NotStored(why, answer.unstored()) if why else None


def _check_early(model: ServedModel, asked: Json) -> None:
    checked(asked, ResponseFields)  # further checks need the stored items


def _failed(failure: Failure) -> bytes:
    event = {
        "type": "error",
        "code": failure.code,
        "message": failure.message,
        "param": failure.param,
        "sequence_number": 0,
    }
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


DIALECT = Dialect(ResponseFields.__struct_fields__, renames=RENAMED)
RESPONSE = Operation(validate, _recall, _check_early, _failed, dialect=DIALECT)


@router.post("/v1/responses", openapi_extra=takes(ResponseFields))
async def create_response(request: Request) -> Response:
    return await accept(request, RESPONSE)


@router.get(_ONE)
async def show_response(request: Request) -> Response:
    """Show a stored response; with ``stream``, its events after number ``starting_after``."""
    body = await RESPONSES.body(request)
    if request.query_params.get("stream", "").lower() != "true":
        return json_response(body)
    after = request.query_params.get("starting_after") or "-1"
    if not after.removeprefix("-").isdecimal() or len(after) > 9:
        raise InvalidRequest("starting_after: a number is needed", "starting_after")
    state_of(request.scope).body.add(_REPLAYED * len(body))
    events = await asyncio.to_thread(_replayed, body, int(after))
    headers = {name.decode(): value.decode() for name, value in STREAM_HEADERS}
    return Response(events, headers=headers, media_type=EVENT_STREAM)


def _replayed(body: bytes, after: int) -> bytes:
    return EventWriter().write(replayed(msgspec.json.decode(body)), after)


@router.delete(_ONE)
async def delete_response(request: Request) -> Response:
    """Remove a stored response, for good."""
    return await RESPONSES.delete(request)


@router.get(_ONE + "/input_items")
async def list_input_items(request: Request) -> Response:
    """List the input items of a stored response, without those of earlier turns."""
    return await RESPONSES.list_items(request, ascending=False)


@router.post(_ONE + "/cancel")
async def cancel_response(request: Request) -> Response:
    """Refuse: only background responses can be cancelled, and this server makes none."""
    gateway = gateway_of(request)
    await RESPONSES.require(request)
    await read_json_body(request, gateway.config)
    id = request.path_params[RESPONSES.param]
    message = f"Response {id} is no background response: end its connection to cancel it."
    raise InvalidRequest(message, "response_id", "not_cancellable")


def replayed(response: Json) -> Iterator[Json]:
    """Yield the events of a stored response, without sequence numbers."""
    none_yet: Json = {"output": [], "usage": None, "completed_at": None, "incomplete_details": None}
    begun = {**response, **none_yet, "status": "in_progress"}
    for kind in ("response.created", "response.in_progress"):
        yield {"type": kind, "response": begun}
    for index, item in enumerate(response["output"]):
        yield {
            "type": "response.output_item.added",
            "output_index": index,
            "item": _opened(item),
        }
        yield from _call_events(index, item)
        yield from _part_events(index, item)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _opened(item: Json) -> Json:
    empty: Json = {"status": "in_progress"} if "status" in item else {}
    if "content" in item:
        empty["content"] = []
    if item["type"] in _WRITTEN:
        empty[_WRITTEN[item["type"]][0]] = ""
    return {**item, **empty}


def _call_events(index: int, item: Json) -> Iterator[Json]:
    if item["type"] in _WRITTEN:
        field, event = _WRITTEN[item["type"]]
        where = {"item_id": item["id"], "output_index": index}
        named = {"name": item["name"]} if item["type"] == "function_call" else {}
        yield {"type": f"{event}.delta", **where, "delta": item[field]}
        yield {"type": f"{event}.done", **where, **named, field: item[field]}


def _part_events(index: int, item: Json) -> Iterator[Json]:
    for number, part in enumerate(item.get("content") or ()):
        where = {"item_id": item["id"], "output_index": index, "content_index": number}
        yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
        if event := _EVENTS.get(part["type"]):
            scores: Json = {"logprobs": []} if part["type"] == "output_text" else {}
            yield {"type": f"{event}.delta", **where, "delta": part["text"], **scores}
            yield {"type": f"{event}.done", **where, "text": part["text"], **scores}
        yield {"type": "response.content_part.done", **where, "part": part}


@router.post("/v1/responses/input_tokens", openapi_extra=takes(ResponseFields))
async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of a request's whole input; nothing is answered or stored."""
    model, question = await _question(request)  # the parsed body is freed before the engine works
    try:
        count = await prompt_tokens(request, model, question)
    except InvalidRequest as error:  # the engine names a chat's field
        raise InvalidRequest(error.message, "input", error.code, error.status) from error
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.post("/v1/responses/compact")
async def compact_conversation(request: Request) -> Response:
    """Refuse: clients shorten their conversations themselves."""
    charged_caller(request)
    await read_json_body(request, gateway_of(request).config)
    message = (
        "This server does not compact conversations: ask for a summary in a response, and begin a"
        " new conversation with it."
    )
    raise InvalidRequest(message, None, "not_supported", 404)


async def _question(request: Request) -> tuple[ServedModel, bytes]:
    gateway, tenant = gateway_of(request), charged_caller(request)
    async with body_for_engine(request, empty=b"{}") as body:
        if body.json.get("model") is None:
            body.json["model"] = body.model.served.model
        fields = await body.off_loop(lambda: checked(body.json, ResponseFields))
        context = await context_of(gateway.stored, tenant, fields, body)
        asked = partial(translation, fields, body.json, context, body.model.image_support)
        keeps = gateway.config.keep_reasoning
        made = await body.off_loop(lambda: _for_engine(body.model, keeps, asked().chat))
        return body.model, made


def _for_engine(model: ServedModel, keeps_reasoning: bool, chat: Json) -> bytes:
    validate({**chat, **HELD_TO_NOTHING}, model.image_support)
    chat["model"] = model.served.model
    return count_question(model.served.template, keeps_reasoning, chat)
