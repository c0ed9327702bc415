"""What a response goes on from: the turns before it, or its conversation; and how it is kept.

A stored response has its own input items and its output. The turns before it are found by walking
``previous_response_id`` back, so that nothing is stored twice. A turn that is missing ends the walk
with the standard error: never with a part of the conversation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from engines.base import SessionRef
from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json
from engines.openai.requests import checked
from gateway.context import Gateway
from gateway.keys import Tenant
from gateway.openai.responses.fields import MAX_ITEMS, ResponseFields
from gateway.openai.responses.items import kind_of
from gateway.openai.responses.output import new_id
from gateway.stored.shelf import Entry, Item, Query, Shelf, StoreFailed
from gateway.stored.stored import Stored

log = logging.getLogger("thermocline.gateway")

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "compaction": "cmp",
}


class Past(NamedTuple):
    """The items before a request, and the session that they belong to."""

    items: list[Json] = []
    session: str | None = None


class Context(NamedTuple):
    """All that a request is about: what was before, and its own items without references."""

    past: Past
    own: list[Json]


async def recalled(gateway: Gateway, tenant: Tenant, asked: Json) -> tuple[ResponseFields, Context]:
    """Check a body, and find what it goes on from.

    What it named is taken out of the body, and the session that it names so is put in.

    Raises:
        InvalidRequest: it is no request for a response, or names something that is not there.
        StoreFailed: the store does not answer.
    """
    if asked.get("model") is None:
        asked["model"] = gateway.served.model
    fields = checked(asked, ResponseFields)
    context = await context_of(gateway.stored, tenant, fields)
    for name in ("previous_response_id", "conversation"):
        asked.pop(name, None)
    if context.past.session is not None:
        asked.setdefault("session_id", context.past.session)
    return fields, context


async def context_of(stored: Stored, tenant: Tenant, fields: ResponseFields) -> Context:
    """Find what a request goes on from, and what its references refer to.

    Raises:
        InvalidRequest: something that it names is not there.
        StoreFailed: the store does not answer.
    """
    if fields.conversation is not None and not fields.conversation_id:
        raise InvalidRequest("conversation: its id is needed", "conversation")
    named = fields.conversation_id or fields.previous_response_id
    refers = any(kind_of(x) == "item_reference" for x in fields.items)
    if not (named or refers):
        return Context(Past(), fields.items)
    past = await stored.ask(partial(_found, tenant=tenant.name, fields=fields), None)
    if past is None and named:
        raise _unknown(fields)
    past = past or Past()
    return Context(past, await _resolved(stored, tenant, fields.items, past))


def _found(shelf: Shelf, *, tenant: str, fields: ResponseFields) -> Past | None:
    if fields.conversation_id:
        return _conversation(shelf, tenant, fields.conversation_id, None)
    if fields.previous_response_id is None:
        return Past()
    past = _chain(shelf, tenant, fields.previous_response_id)
    return past and past._replace(session=_branch(shelf, tenant, fields, past.session))


def _branch(shelf: Shelf, tenant: str, fields: ResponseFields, session: str | None) -> str | None:
    """Return the session to go on in: a response that another followed begins one of its own.

    Two conversations that began alike, and two branches of one, would else overwrite each other.
    """
    if session is None or shelf.get(tenant, "conversation", session) is not None:
        return fields.previous_response_id
    last = shelf.latest(tenant, "response", session)
    return session if last == fields.previous_response_id else fields.previous_response_id


def _chain(shelf: Shelf, tenant: str, id: str) -> Past | None:
    """Walk back from a response; None if it, or one before it, is not there."""
    turns: list[list[Json]] = []
    session: str | None = None
    num_items = 0
    following: str | None = id
    while following is not None:
        entry = shelf.get(tenant, "response", following)
        page = shelf.items(tenant, "response", following, Query())
        if entry is None or page is None:
            return None
        session = session or entry.session
        body: Json = msgspec.json.decode(entry.body)
        turn = [*(msgspec.json.decode(x.body) for x in page.rows), *body["output"]]
        if body.get("conversation"):
            before = _conversation(shelf, tenant, body["conversation"]["id"], turn)
            if before is None:
                return None
            turn = before.items
        turns.append(turn)
        num_items += len(turn)
        if num_items > MAX_ITEMS:
            message = f"the conversation has more than {MAX_ITEMS} items"
            raise InvalidRequest(f"previous_response_id: {message}", "previous_response_id")
        following = body.get("previous_response_id")
    return Past([item for turn in reversed(turns) for item in turn], session)


def _conversation(shelf: Shelf, tenant: str, id: str, until: Sequence[Json] | None) -> Past | None:
    """Read a conversation up to the last item of ``until``; all of it if that is None."""
    if shelf.get(tenant, "conversation", id) is None:
        return None
    page = shelf.items(tenant, "conversation", id, Query())
    rows = page.rows if page else []
    if until is not None:
        last = {x.get("id") for x in until[-1:]}
        ends = [i for i, row in enumerate(rows) if row.id in last]
        rows = rows[: ends[-1] + 1] if ends else rows
    return Past([msgspec.json.decode(x.body) for x in rows], id)


async def _resolved(stored: Stored, tenant: Tenant, items: list[Json], past: Past) -> list[Json]:
    """Put what references refer to in their places; what the past has is not said twice."""
    known = {x.get("id") for x in past.items}
    resolved = []
    for item in items:
        if kind_of(item) != "item_reference":
            resolved.append(item)
        elif item.get("id") not in known:
            resolved.append(await _referred(stored, tenant, item.get("id")))
    return resolved


async def _referred(stored: Stored, tenant: Tenant, id: object) -> Json:
    if not isinstance(id, str):
        raise InvalidRequest("input: an item_reference needs an id", "input")
    body = await stored.ask(partial(_item, tenant=tenant.name, id=id), None)
    if body is None:
        message = f"Item with id {id[:128]!r} not found."
        raise InvalidRequest(message, "input", "item_not_found", 404)
    found: Json = msgspec.json.decode(body)
    return found


def _item(shelf: Shelf, *, tenant: str, id: str) -> bytes | None:
    return shelf.find_item(tenant, id)


def full_items(items: Sequence[Json]) -> list[Json]:
    """Write items in full: each with an id of its own, a type, and its content in parts."""
    ids: set[str] = set()
    full = []
    for item in items:
        kind = kind_of(item)
        id = item.get("id")
        if not isinstance(id, str) or not id or id in ids:
            id = new_id(_PREFIXES.get(kind, "item"))
        ids.add(id)
        shown = {**item, "id": id, "type": kind}
        if kind == "message":
            shown["content"] = _parts(item.get("content"), item.get("role"))
            shown.setdefault("status", "completed")
        full.append(shown)
    return full


def rows_of(items: Sequence[Json]) -> list[Item]:
    """Write full items as a shelf keeps them."""
    return [Item(x["id"], msgspec.json.encode(x)) for x in items]


def _parts(content: object, role: object) -> object:
    if not isinstance(content, str):
        return content or []
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]


async def keep_response(
    stored: Stored, fields: ResponseFields, own: Sequence[Json], response: Json, session: SessionRef
) -> None:
    """Store a response, and add its turn to its conversation. Failures are told to the log only."""
    items = full_items(own)
    output = response["output"]
    tenant = session.tenant
    body = msgspec.json.encode(response)
    entry = Entry("response", response["id"], session.id, body)

    def work(shelf: Shelf) -> None:
        if fields.conversation_id:
            turn = rows_of([*items, *output])
            shelf.append(tenant, "conversation", fields.conversation_id, turn)
        if fields.stores and not shelf.put(tenant, entry, rows_of(items)):
            log.warning("response %s was not stored: it is larger than the budget", entry.id)

    try:
        await stored.ask(work, None)
    except StoreFailed as error:
        log.warning("response %s was not stored: %s", entry.id, error)


def _unknown(fields: ResponseFields) -> InvalidRequest:
    if fields.conversation_id:
        message = f"Conversation with id {fields.conversation_id[:128]!r} not found."
        return InvalidRequest(message, "conversation", "conversation_not_found", 404)
    message = f"Previous response with id {str(fields.previous_response_id)[:128]!r} not found."
    return InvalidRequest(message, "previous_response_id", "previous_response_not_found")
