"""/v1/conversations: lists of items that responses go on from and add to.

A conversation is a session of the same id: deleting the session forgets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json
from engines.openai.requests import checked, parse_json
from gateway.body import read_json_body
from gateway.context import caller_of, gateway_of
from gateway.openai.lists import query_of, shown, shown_items, shown_list
from gateway.openai.responses.fields import Metadata
from gateway.openai.responses.history import full_items, rows_of
from gateway.openai.responses.items import MessageWriter
from gateway.openai.responses.output import new_id
from gateway.stored.shelf import Entry, Shelf

T = TypeVar("T")
router = APIRouter()
_ALL = "/v1/conversations"
_ONE = _ALL + "/{conversation_id}"
_ITEM = _ONE + "/items/{item_id}"
NewItems = Annotated[list[Json], msgspec.Meta(max_length=512)]


class NewConversation(msgspec.Struct, frozen=True):
    """The body of POST /v1/conversations."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class ConversationChange(msgspec.Struct, frozen=True):
    """The body of POST /v1/conversations/{id}."""

    metadata: Metadata | None


class AddedItems(msgspec.Struct, frozen=True):
    """The body of POST /v1/conversations/{id}/items."""

    items: NewItems


@router.post(_ALL)
async def create_conversation(request: Request) -> Response:
    """Make a conversation, with items perhaps."""
    tenant, stored = caller_of(request), gateway_of(request).stored
    asked = checked(await _body(request), NewConversation)
    items = _checked_items(asked.items or [])
    id = new_id("conv")
    body = msgspec.json.encode(_conversation(id, int(time.time()), asked.metadata))
    entry = Entry("conversation", id, id, body)
    if not await stored.ask(lambda shelf: shelf.put(tenant.name, entry, rows_of(items)), False):
        message = "Nothing is stored here, or it is too large (see gateway.stored_bytes)."
        raise InvalidRequest(message, None, "not_stored")
    return shown(body)


@router.get(_ONE)
async def show_conversation(request: Request) -> Response:
    tenant, id = caller_of(request), request.path_params["conversation_id"]
    return shown((await _found(request, lambda x: x.get(tenant.name, "conversation", id))).body)


@router.post(_ONE)
async def update_conversation(request: Request) -> Response:
    """Replace a conversation's metadata."""
    tenant, id = caller_of(request), request.path_params["conversation_id"]
    asked = checked(await _body(request), ConversationChange)

    def work(shelf: Shelf) -> bytes | None:
        entry = shelf.get(tenant.name, "conversation", id)
        if entry is None:
            return None
        created = msgspec.json.decode(entry.body)["created_at"]
        body = msgspec.json.encode(_conversation(id, created, asked.metadata))
        return body if shelf.change(tenant.name, "conversation", id, body) else None

    return shown(await _found(request, work))


@router.delete(_ONE)
async def delete_conversation(request: Request) -> Response:
    """Remove a conversation and its items, for good."""
    tenant, id = caller_of(request), request.path_params["conversation_id"]
    await _found(request, lambda x: x.delete(tenant.name, "conversation", id) or None)
    return shown({"id": id, "object": "conversation.deleted", "deleted": True})


@router.post(_ONE + "/items")
async def add_items(request: Request) -> Response:
    """Add items behind the others; answers with those that were added."""
    tenant, id = caller_of(request), request.path_params["conversation_id"]
    items = _checked_items(checked(await _body(request), AddedItems).items)
    rows = rows_of(items)
    await _found(request, lambda x: x.append(tenant.name, "conversation", id, rows) or None)
    return shown_items(items)


@router.get(_ONE + "/items")
async def list_items(request: Request) -> Response:
    tenant, id = caller_of(request), request.path_params["conversation_id"]
    query = query_of(request, ascending=False)
    return shown_list(
        await _found(request, lambda x: x.items(tenant.name, "conversation", id, query))
    )


@router.get(_ITEM)
async def show_item(request: Request) -> Response:
    tenant, id = caller_of(request), request.path_params["conversation_id"]
    item = request.path_params["item_id"]

    def work(shelf: Shelf) -> bytes | None:
        known = shelf.get(tenant.name, "conversation", id) is not None
        return shelf.find_item(tenant.name, item, id) if known else None

    return shown(await _found(request, work))


@router.delete(_ITEM)
async def delete_item(request: Request) -> Response:
    """Remove one item; answers with the conversation."""
    tenant, id = caller_of(request), request.path_params["conversation_id"]
    item = request.path_params["item_id"]

    def work(shelf: Shelf) -> Entry | None:
        there = shelf.delete_item(tenant.name, "conversation", id, item)
        return shelf.get(tenant.name, "conversation", id) if there else None

    return shown((await _found(request, work)).body)


async def _body(request: Request) -> Json:
    """Read a small body; none at all is an empty object."""
    return parse_json(await read_json_body(request, gateway_of(request).config) or b"{}")


def _checked_items(items: list[Json]) -> list[Json]:
    """Check that a chat can be made of items, and write them in full."""
    MessageWriter().add_all(items, "items")
    return full_items(items)


async def _found(request: Request, work: Callable[[Shelf], T | None]) -> T:
    """Ask the store. Raises ``InvalidRequest``, 404, where it finds nothing."""
    found = await gateway_of(request).stored.ask(work, None)
    if found is None:
        id = request.path_params["conversation_id"][:128]
        item = request.path_params.get("item_id")
        what = f"Item {item[:128]!r} of conversation" if item else "Conversation with id"
        message = f"{what} {id!r} not found."
        raise InvalidRequest(message, "conversation_id", "conversation_not_found", 404)
    return found


def _conversation(id: str, created: int, metadata: dict[str, str] | None) -> Json:
    row = {"id": id, "object": "conversation", "created_at": created}
    return {**row, "metadata": metadata or {}}
