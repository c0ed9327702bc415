"""Chat completions that were stored: listed, shown, labelled anew and deleted."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.base import SessionRef
from engines.openai.messages import Json
from gateway.context import caller_of, gateway_of
from gateway.openai.lists import query_of, shown_list
from gateway.openai.stored_objects import StoredKind
from gateway.stored.shelf import Entry, Item, Page, StoreFailed
from gateway.stored.stored import Stored

log = logging.getLogger("thermocline.gateway")

router = APIRouter()
_ALL = "/v1/chat/completions"
_ONE = _ALL + "/{completion_id}"
_LABEL = re.compile(r"metadata\[(.{1,64})\]")


COMPLETION = StoredKind("completion", "Chat completion", "chat.completion.deleted")


async def keep_completion(
    stored: Stored, messages: list[Json], completion: Json, session: SessionRef
) -> None:
    """Store a completion and the messages that it answers. Failures are told to the log only."""
    id = str(completion.get("id"))
    rows = [
        Item(f"{id}-{i}", msgspec.json.encode({**message, "id": f"{id}-{i}"}))
        for i, message in enumerate(messages)
    ]
    entry = Entry("completion", id, session.id, msgspec.json.encode(completion))
    try:
        if not await stored.ask(lambda shelf: shelf.put(session.tenant, entry, rows), True):
            log.warning("completion %s was not stored: it is larger than the budget", id)
    except StoreFailed as error:
        log.warning("completion %s was not stored: %s", id, error)


@router.get(_ALL)
async def list_completions(request: Request) -> Response:
    """List stored completions; ``model`` and ``metadata[key]`` choose among them."""
    tenant, stored = caller_of(request), gateway_of(request).stored
    query = query_of(request, ascending=True)
    wanted = _filter(request)
    return shown_list(
        await stored.ask(
            lambda shelf: shelf.entries(tenant.name, "completion", query, wanted), Page([], False)
        )
    )


@router.get(_ONE)
async def show_completion(request: Request) -> Response:
    return await COMPLETION.show(request)


@router.post(_ONE)
async def update_completion(request: Request) -> Response:
    """Replace a stored completion's metadata."""
    return await COMPLETION.label(request)


@router.delete(_ONE)
async def delete_completion(request: Request) -> Response:
    """Remove a stored completion, for good."""
    return await COMPLETION.delete(request)


@router.get(_ONE + "/messages")
async def list_messages(request: Request) -> Response:
    """List the messages that a stored completion answers."""
    return await COMPLETION.list_items(request, ascending=True)


def _filter(request: Request) -> Callable[[bytes], bool]:
    model = request.query_params.get("model")
    pairs = [(_LABEL.fullmatch(k), v) for k, v in request.query_params.items()]
    labels = {found[1]: value for found, value in pairs if found}

    def wanted(body: bytes) -> bool:
        row = msgspec.json.decode(body)
        own = row.get("metadata") or {}
        return (not model or row.get("model") == model) and labels.items() <= own.items()

    return wanted
