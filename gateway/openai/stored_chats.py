"""Chat completions that were stored: listed, shown, labelled anew and deleted."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.base import SessionRef
from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json
from engines.openai.requests import checked, parse_json
from gateway.body import read_json_body
from gateway.context import caller_of, gateway_of
from gateway.openai.lists import query_of, shown, shown_list
from gateway.openai.responses.fields import Metadata
from gateway.stored.shelf import Entry, Item, Page, Shelf, StoreFailed
from gateway.stored.stored import Stored

log = logging.getLogger("thermocline.gateway")

T = TypeVar("T")
router = APIRouter()
_ALL = "/v1/chat/completions"
_ONE = _ALL + "/{completion_id}"
_LABEL = re.compile(r"metadata\[(.{1,64})\]")


class CompletionChange(msgspec.Struct, frozen=True):
    """The body of POST /v1/chat/completions/{id}."""

    metadata: Metadata | None


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
    tenant, id = caller_of(request), request.path_params["completion_id"]
    return shown((await _found(request, lambda x: x.get(tenant.name, "completion", id))).body)


@router.post(_ONE)
async def update_completion(request: Request) -> Response:
    """Replace a stored completion's metadata."""
    tenant, id = caller_of(request), request.path_params["completion_id"]
    body = parse_json(await read_json_body(request, gateway_of(request).config) or b"{}")
    change = checked(body, CompletionChange)

    def work(shelf: Shelf) -> bytes | None:
        entry = shelf.get(tenant.name, "completion", id)
        if entry is None:
            return None
        changed = {**msgspec.json.decode(entry.body), "metadata": change.metadata or {}}
        encoded = msgspec.json.encode(changed)
        return encoded if shelf.change(tenant.name, "completion", id, encoded) else None

    return shown(await _found(request, work))


@router.delete(_ONE)
async def delete_completion(request: Request) -> Response:
    """Remove a stored completion, for good."""
    tenant, id = caller_of(request), request.path_params["completion_id"]
    await _found(request, lambda x: x.delete(tenant.name, "completion", id) or None)
    return shown({"id": id, "object": "chat.completion.deleted", "deleted": True})


@router.get(_ONE + "/messages")
async def list_messages(request: Request) -> Response:
    """List the messages that a stored completion answers."""
    tenant, id = caller_of(request), request.path_params["completion_id"]
    query = query_of(request, ascending=True)
    return shown_list(
        await _found(request, lambda x: x.items(tenant.name, "completion", id, query))
    )


async def _found(request: Request, work: Callable[[Shelf], T | None]) -> T:
    """Ask the store. Raises ``InvalidRequest``, 404, where it finds nothing."""
    found = await gateway_of(request).stored.ask(work, None)
    if found is None:
        message = f"Chat completion {request.path_params['completion_id'][:128]!r} not found."
        raise InvalidRequest(message, "completion_id", "completion_not_found", 404)
    return found


def _filter(request: Request) -> Callable[[bytes], bool]:
    model = request.query_params.get("model")
    pairs = [(_LABEL.fullmatch(k), v) for k, v in request.query_params.items()]
    labels = {found[1]: value for found, value in pairs if found}

    def wanted(body: bytes) -> bool:
        row = msgspec.json.decode(body)
        own = row.get("metadata") or {}
        return (not model or row.get("model") == model) and labels.items() <= own.items()

    return wanted
