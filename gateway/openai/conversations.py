"""/v1/conversations: lists of items that responses continue, and add their own items to.

A conversation is a session of the same id: deleting the session deletes the conversation.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.errors import InvalidRequest
from engines.openai.messages import NO_IMAGES, Json
from engines.openai.requests import checked
from gateway.openai.responses.history import full_items, rows_of
from gateway.openai.responses.items import MessageWriter, check_nesting
from gateway.openai.responses.output import new_id
from gateway.openai.stored_objects import Metadata, MetadataChange, StoredKind, shown_list
from gateway.request.body import parsed
from gateway.request.callers import charged_caller, gateway_of
from gateway.request.routing import json_response, new_router, takes
from gateway.stored.objects import MAX_ITEMS, ObjectList, Objects, Outgrown
from gateway.stored.rows import Item
from gateway.stored.table import Steps

router = new_router()
_ALL = "/v1/conversations"
_ONE = _ALL + "/{conversation_id}"
_ITEM = _ONE + "/items/{item_id}"
CONVERSATION = StoredKind("conversation", "Conversation with id", "conversation.deleted")
NewItems = Annotated[list[Json], msgspec.Meta(max_length=512)]


class NewConversation(msgspec.Struct, frozen=True):
    """The body of POST /v1/conversations."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class AddedItems(msgspec.Struct, frozen=True):
    """The body of POST /v1/conversations/{id}/items."""

    items: NewItems


@router.post(_ALL, openapi_extra=takes(NewConversation))
async def create_conversation(request: Request) -> Response:
    """Create a conversation, optionally with items."""
    tenant, stored = charged_caller(request).name, gateway_of(request).stored
    metadata, rows = await _read(request, NewConversation)
    id = new_id("conv")
    made = {"id": id, "object": "conversation", "created_at": int(time.time())}
    made["metadata"] = metadata
    if not await stored.ask(tenant, lambda x: x.put("conversation", made, id, rows), False):
        message = "This server stores nothing, or this is too large (see gateway.stored_bytes)."
        raise InvalidRequest(message, None, "not_stored")
    return json_response(made)


@router.get(_ONE)
async def show_conversation(request: Request) -> Response:
    return await CONVERSATION.show(request)


@router.post(_ONE, openapi_extra=takes(MetadataChange))
async def update_conversation(request: Request) -> Response:
    """Replace a conversation's metadata."""
    return await CONVERSATION.label(request)


@router.delete(_ONE)
async def delete_conversation(request: Request) -> Response:
    """Remove a conversation and its items, for good."""
    return await CONVERSATION.delete(request)


@router.post(_ONE + "/items", openapi_extra=takes(AddedItems))
async def add_items(request: Request) -> Response:
    """Append items; answer with them. An item whose id is in use gets a new one."""
    charged_caller(request)
    _, rows = await _read(request, AddedItems)
    try:
        added = await CONVERSATION.ask(request, lambda x, id: x.append("conversation", id, rows))
    except Outgrown:
        message = f"items: a conversation has at most {MAX_ITEMS}: begin a new one"
        raise InvalidRequest(message, "items", "conversation_too_large") from None
    return shown_list(ObjectList(added, False))


@router.get(_ONE + "/items")
async def list_items(request: Request) -> Response:
    return await CONVERSATION.list_items(request, ascending=False)


@router.get(_ITEM)
async def show_item(request: Request) -> Response:
    item = request.path_params["item_id"]
    return json_response(
        await CONVERSATION.ask(request, lambda x, id: x.item("conversation", id, item))
    )


@router.delete(_ITEM)
async def delete_item(request: Request) -> Response:
    """Remove one item; answer with the conversation."""
    item = request.path_params["item_id"]

    def work(objects: Objects, id: str) -> Steps[bytes | None]:
        there = yield from objects.remove_item("conversation", id, item)
        return (yield from objects.show("conversation", id)) if there else None

    return json_response(await CONVERSATION.ask(request, work))


async def _read(
    request: Request, form: type[NewConversation] | type[AddedItems]
) -> tuple[Json, list[Item]]:
    """Read a body and return its metadata and its items, ready to be stored."""
    gateway = gateway_of(request)
    charged_caller(request)
    seeing = [x.image_support for x in gateway.models if x.engine.ready]
    image_support = next((x for x in seeing if x.sees), NO_IMAGES)
    writer = MessageWriter(image_support)
    async with parsed(gateway, request, empty=b"{}") as body:
        return await body.off_loop(partial(_checked, body.json, form, writer))


def _checked(
    asked: Json, form: type[NewConversation] | type[AddedItems], writer: MessageWriter
) -> tuple[Json, list[Item]]:
    """Check that the items can be translated into a chat, and return metadata and full items."""
    body = checked(asked, form)
    items = body.items or []
    check_nesting(items, "items")
    writer.add_all(items, "items")
    metadata = body.metadata if isinstance(body, NewConversation) else None
    return metadata or {}, rows_of(full_items(items))
