"""Reads the history that a response continues (earlier responses or a conversation); stores turns.

A stored response has its own input items and its output. Earlier turns are found by following
``previous_response_id`` back, so that nothing is stored twice. If a turn is missing or damaged, the
request fails with the standard error; it never continues a part of the conversation.

Recalled items count as a part of the request's body: in bytes before they are read, in values
before they are parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from engines.base import SessionRef
from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json
from engines.openai.requests import checked
from gateway.edge.bodies import check_weight
from gateway.gateway import Gateway
from gateway.keys import Tenant
from gateway.openai.responses.items import kind_of
from gateway.openai.responses.output import new_id
from gateway.openai.responses.response import MAX_ITEMS, ResponseFields
from gateway.request.body import ParsedBody
from gateway.stored.objects import Objects, Outgrown
from gateway.stored.rows import Head, Item
from gateway.stored.stored import DELETED, Stored
from gateway.stored.table import Steps

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}


# A longer id is replaced: each is stored several times besides the counted bytes of its item.
_MAX_ID_CHARS = 256


class EarlierItems(NamedTuple):
    """The items that a request continues, and their session (None if they have none)."""

    items: list[Json] = []
    session: str | None = None


class Context(NamedTuple):
    """The items of a whole prompt: the earlier ones, and the request's own, references resolved."""

    past: EarlierItems
    own: list[Json]


class _Recalled(NamedTuple):
    """Stored items that were read for a request, and are not parsed yet."""

    items: list[Item]
    session: str | None
    referred: dict[str, bytes]  # items that the request refers to, by their ids


class _RecallRoom:
    """The room that is left for the stored items that a request recalls."""

    def __init__(self, max_bytes: int, field: str) -> None:
        """
        Args:
            field: the request's field that names the items, for errors.
        """
        self._bytes = max_bytes
        self._items = MAX_ITEMS
        self._field = field

    def take(self, nbytes: int, num_items: int) -> None:
        """Take room for items that are about to be read. Raises ``InvalidRequest``."""
        self._bytes -= nbytes
        self._items -= num_items
        if self._bytes < 0:
            raise self._too_large("it would be larger than gateway.max_body_bytes")
        if self._items < 0:
            raise self._too_large(f"it would have more than {MAX_ITEMS} items")

    def take_all(self, head: Head) -> None:
        """Take room for all items of an object. Raises ``InvalidRequest``."""
        self.take(head.nbytes, head.num)

    def _too_large(self, why: str) -> InvalidRequest:
        message = (
            f"{self._field}: together with the items that it continues, the request is too large:"
            f" {why}. Begin a new conversation with a summary of this one, or delete some items."
        )
        return InvalidRequest(message, self._field, "conversation_too_large")


async def recalled(
    gateway: Gateway, tenant: Tenant, body: ParsedBody
) -> tuple[ResponseFields, Context]:
    """Check a body, and read the items that it continues.

    In the body, ``previous_response_id`` and ``conversation`` are replaced by ``session_id``.

    Raises:
        InvalidRequest: the body is malformed, or names items that do not exist or are too large.
        StoreFailed: the store does not answer.
    """
    asked = body.json
    if asked.get("model") is None:
        asked["model"] = body.model.served.model
    fields = await body.off_loop(partial(checked, asked, ResponseFields))
    context = await context_of(gateway.stored, tenant, fields, body)
    for name in ("previous_response_id", "conversation"):
        asked.pop(name, None)
    if context.past.session is not None:
        asked.setdefault("session_id", context.past.session)
    return fields, context


async def context_of(
    stored: Stored, tenant: Tenant, fields: ResponseFields, body: ParsedBody
) -> Context:
    """Read the items that a request continues, and those that its references name.

    Raises:
        ClientGone: the client left meanwhile.
        InvalidRequest: the request names items that do not exist or are too large.
        RequestRefused: 503, all bodies together, with the items that they recall, are too large.
        StoreFailed: the store does not answer.
    """
    if fields.conversation is not None and not fields.conversation_id:
        raise InvalidRequest("conversation: its id is needed", "conversation")
    named = fields.conversation_id or fields.previous_response_id
    refers = any(kind_of(x) == "item_reference" for x in fields.items)
    if not (named or refers):
        return Context(EarlierItems(), fields.items)
    field = "conversation" if fields.conversation_id else "previous_response_id"
    room = _RecallRoom(body.room, field if named else "input")
    read = partial(_read, fields=fields, room=room)

    async def ask() -> _Recalled | None:
        found = await stored.ask(tenant.name, read, None, body.recall)
        await body.recalled()
        return found

    found = await body.while_client_stays(ask)
    if found is None:
        raise _unknown(fields)
    return await body.off_loop(partial(_parsed, found, fields.items))


def _parsed(found: _Recalled, own: Sequence[Json]) -> Context:
    bodies = [*(x.body for x in found.items), *found.referred.values()]
    check_weight(*bodies, what="The history that the request continues")
    past = EarlierItems([msgspec.json.decode(x.body) for x in found.items], found.session)
    known = {x.id for x in found.items}
    resolved: list[Json] = []
    for item in own:
        if kind_of(item) != "item_reference":
            resolved.append(item)
        elif item["id"] not in known:  # an item of the history is not repeated
            resolved.append(msgspec.json.decode(found.referred[item["id"]]))
    return Context(past, resolved)


def _read(
    objects: Objects, *, fields: ResponseFields, room: _RecallRoom
) -> Steps[_Recalled | None]:
    """Read all items that a request recalls; None if the history it names does not exist."""
    items: list[Item] | None = []
    session = None
    if fields.conversation_id:
        session = fields.conversation_id
        items = yield from _conversation(objects, session, room)
    elif fields.previous_response_id:
        chain = yield from _chain(objects, fields.previous_response_id, room)
        items, session = chain or (None, None)
        session = _branch(objects, fields.previous_response_id, session)
    if items is None:
        return None
    known = {x.id for x in items}
    referred: dict[str, bytes] = {}
    for item in fields.items:
        if kind_of(item) == "item_reference":
            id = item.get("id")
            if not isinstance(id, str):
                raise InvalidRequest("input: an item_reference needs an id", "input")
            if id in known:
                continue
            if id not in referred:
                referred[id] = yield from _referred(objects, id)
            room.take(len(referred[id]), 1)
            yield len(referred[id])  # counted for each reference, since the prompt repeats it
    return _Recalled(items, session, referred)


def _branch(objects: Objects, id: str, session: str | None) -> str | None:
    """Return the session of a request that continues the response ``id``.

    It is ``session`` if the response is the latest one there. Otherwise a new branch begins, with
    ``id`` as its session, since two branches in one session would overwrite each other.
    """
    if session is None or objects.find("conversation", session) is not None:
        return id
    return session if objects.latest("response", session) == id else id


def _chain(objects: Objects, id: str, room: _RecallRoom) -> Steps[tuple[list[Item], str] | None]:
    """Read a response and all before it: return their items and their session.

    None if one of them does not exist.
    """

    nbytes = 0

    def take(head: Head) -> None:
        """Take room for a turn: at least one item, so that no chain is endless."""
        nonlocal nbytes
        if "conversation" in head.about:  # the conversation has its items
            room.take(0, 1)
        else:
            room.take(head.nbytes, max(1, head.num))
            nbytes += head.nbytes

    line = yield from objects.line(id, take)
    if line is None:
        return None
    yield nbytes
    items: list[Item] = []
    for object in reversed(line):
        if before := object.head.about.get("conversation"):
            turn_ids = [id for page in object.head.pages for id in page.ids]
            turn = yield from _conversation(objects, before, room, turn_ids or None)
        else:
            turn = yield from objects.read_all(object)
        if turn is None:
            return None
        items += turn
    return items, next((x.head.session for x in line if x.head.session), id)


def _conversation(
    objects: Objects, id: str, room: _RecallRoom, until: Collection[str] | None = None
) -> Steps[list[Item] | None]:
    """Read the items of a conversation, all or up to the last one whose id is in ``until``.

    ``until``: the ids of a turn's items; those of later turns must not be read. Returns None if the
    conversation, or all items of the turn, do not exist any more.
    """
    object = objects.find("conversation", id)
    if object is None:
        return None
    room.take_all(object.head)
    yield object.head.nbytes
    items = yield from objects.read_all(object)
    if items is None or until is None:
        return items
    ends = [i for i, x in enumerate(items, 1) if x.id in until]
    return items[: ends[-1]] if ends else None


def _referred(objects: Objects, id: str) -> Steps[bytes]:
    body = yield from objects.find_item(id)
    if body is None:
        message = f"Item with id {id[:128]!r} not found."
        raise InvalidRequest(message, "input", "item_not_found", 404)
    return body


def full_items(items: Sequence[Json]) -> list[Json]:
    """Return items in full form: each with a unique id, a type, and its content in parts."""
    ids: set[str] = set()
    full = []
    for item in items:
        kind = kind_of(item)
        id = item.get("id")
        if not isinstance(id, str) or not 0 < len(id) <= _MAX_ID_CHARS or id in ids:
            id = new_id(_PREFIXES.get(kind, "item"))
        ids.add(id)
        shown = {**item, "id": id, "type": kind}
        if kind == "message":
            shown["content"] = _parts(item.get("content"), item.get("role"))
            shown.setdefault("status", "completed")
        full.append(shown)
    return full


def rows_of(items: Sequence[Json]) -> list[Item]:
    """Return full items in their stored form."""
    return [Item(x["id"], msgspec.json.encode(x)) for x in items]


def _parts(content: object, role: object) -> object:
    if not isinstance(content, str):
        return content or []
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]


class KeptTurn(NamedTuple):
    """The part of a turn that is stored besides its answer."""

    conversation_id: str | None  # to which the turn is added; None: to none
    stores: bool  # True: the response is stored
    own: list[Item]  # the request's items


async def keep_response(
    stored: Stored,
    turn: KeptTurn,
    response: Json,
    session: SessionRef,
    is_deleted: Callable[[], bool],
) -> str:
    """Store a response, and add its turn to its conversation.

    Returns "", or the reason why it could not be stored; see ``NotStored``.
    """

    def work(objects: Objects) -> Steps[str]:
        own = turn.own
        if id := turn.conversation_id:
            new = [*own, *rows_of(response["output"])]
            try:
                added = yield from objects.append("conversation", id, new)
            except Outgrown:
                return "too-large"
            if added is None:
                return DELETED
            own = added[: len(own)]
        if not turn.stores:
            return ""
        stored = yield from objects.put("response", response, session.id, own)
        return "" if stored else "too-large"

    return await stored.keep(f"response {response['id']}", session, work, is_deleted)


def _unknown(fields: ResponseFields) -> InvalidRequest:
    if fields.conversation_id:
        message = f"Conversation with id {fields.conversation_id[:128]!r} not found."
        return InvalidRequest(message, "conversation", "conversation_not_found", 404)
    message = f"Previous response with id {str(fields.previous_response_id)[:128]!r} not found."
    return InvalidRequest(message, "previous_response_id", "previous_response_not_found")
