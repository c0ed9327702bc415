"""/v1/conversations: lists of items that responses go on from and add to.

A conversation is a session of the same id: deleting the session forgets it.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.errors import InvalidRequest
from engines.openai.images import BLIND
from engines.openai.messages import Json
from engines.openai.requests import checked
from gateway.context import caller_of, gateway_of
from gateway.openai.lists import shown, shown_items
from gateway.openai.responses.history import full_items, rows_of
from gateway.openai.responses.items import MessageWriter
from gateway.openai.responses.output import new_id
from gateway.openai.stored_objects import Metadata, StoredKind, json_of
from gateway.stored.shelf import Entry, Shelf

router = APIRouter()
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


@router.post(_ALL)
async def create_conversation(request: Request) -> Response:
    """Make a conversation, with items perhaps."""
    tenant, stored = caller_of(request), gateway_of(request).stored
    asked = checked(await json_of(request), NewConversation)
    items = _checked_items(request, asked.items or [])
    id = new_id("conv")
    body = msgspec.json.encode(_conversation(id, asked.metadata))
    entry = Entry("conversation", id, id, body)
    if not await stored.ask(lambda shelf: shelf.put(tenant.name, entry, rows_of(items)), False):
        message = "Nothing is stored here, or it is too large (see gateway.stored_bytes)."
        raise InvalidRequest(message, None, "not_stored")
    return shown(body)


@router.get(_ONE)
async def show_conversation(request: Request) -> Response:
    return await CONVERSATION.show(request)


@router.post(_ONE)
async def update_conversation(request: Request) -> Response:
    """Replace a conversation's metadata."""
    return await CONVERSATION.label(request)


@router.delete(_ONE)
async def delete_conversation(request: Request) -> Response:
    """Remove a conversation and its items, for good."""
    return await CONVERSATION.delete(request)


@router.post(_ONE + "/items")
async def add_items(request: Request) -> Response:
    """Add items behind the others; answers with those that were added."""
    caller_of(request)
    items = _checked_items(request, checked(await json_of(request), AddedItems).items)
    rows = rows_of(items)
    await CONVERSATION.ask(
        request, lambda shelf, *of: shelf.append(of[0], "conversation", of[1], rows) or None
    )
    return shown_items(items)


@router.get(_ONE + "/items")
async def list_items(request: Request) -> Response:
    return await CONVERSATION.list_items(request, ascending=False)


@router.get(_ITEM)
async def show_item(request: Request) -> Response:
    item = request.path_params["item_id"]

    def work(shelf: Shelf, tenant: str, id: str) -> bytes | None:
        known = shelf.get(tenant, "conversation", id) is not None
        return shelf.find_item(tenant, item, id) if known else None

    return shown(await CONVERSATION.ask(request, work))


@router.delete(_ITEM)
async def delete_item(request: Request) -> Response:
    """Remove one item; answers with the conversation."""
    item = request.path_params["item_id"]

    def work(shelf: Shelf, tenant: str, id: str) -> Entry | None:
        there = shelf.delete_item(tenant, "conversation", id, item)
        return shelf.get(tenant, "conversation", id) if there else None

    return shown((await CONVERSATION.ask(request, work)).body)


def _checked_items(request: Request, items: list[Json]) -> list[Json]:
    """Check that a chat can be made of items, and write them in full."""
    gateway, tenant = gateway_of(request), caller_of(request)
    sight = gateway.sight if gateway.engine.ready else BLIND
    MessageWriter(gateway.sealed_texts(tenant).open, sight).add_all(items, "items")
    return full_items(items)


def _conversation(id: str, metadata: dict[str, str] | None) -> Json:
    row = {"id": id, "object": "conversation", "created_at": int(time.time())}
    return {**row, "metadata": metadata or {}}
