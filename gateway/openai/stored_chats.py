"""Stored chat completions: lists, shows and deletes them, and replaces their metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.base import SessionRef
from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json
from gateway.openai.stored_objects import MetadataChange, StoredKind, query_of, shown_list
from gateway.request.callers import charged_caller, gateway_of, state_of
from gateway.request.routing import new_router, takes
from gateway.stored.objects import ObjectList, Objects
from gateway.stored.rows import Item
from gateway.stored.stored import Stored
from gateway.stored.table import Steps

router = new_router()
_ALL = "/v1/chat/completions"
_ONE = _ALL + "/{completion_id}"
MAX_LABELS = 16  # as many as an object's metadata may have
_LABEL = re.compile(r"metadata\[(.{1,64})\]")


COMPLETION = StoredKind("completion", "Chat completion", "chat.completion.deleted")


def rows_of(messages: object) -> list[bytes]:
    """Encode the messages of a chat as JSON, to be stored; they have not been validated yet."""
    return [msgspec.json.encode(x) for x in messages] if isinstance(messages, list) else []


async def keep_completion(
    stored: Stored,
    messages: Sequence[bytes],
    completion: Json,
    session: SessionRef,
    is_deleted: Callable[[], bool],
) -> str:
    """Store a completion and the messages that it answers.

    Returns "", or the reason why it could not be stored; see ``NotStored``.
    """
    id = str(completion.get("id"))

    def work(objects: Objects) -> Steps[str]:
        rows = []
        for i, message in enumerate(messages):
            named = {**msgspec.json.decode(message), "id": f"{id}-{i}"}
            rows.append(Item(named["id"], msgspec.json.encode(named)))
        stored = yield from objects.put("completion", completion, session.id, rows)
        return "" if stored else "too-large"

    return await stored.keep(f"completion {id}", session, work, is_deleted)


@router.get(_ALL)
async def list_completions(request: Request) -> Response:
    """List stored completions; ``model`` and ``metadata[key]`` filter them."""
    tenant, stored = charged_caller(request).name, gateway_of(request).stored
    query = query_of(request, ascending=True)
    like = _like(request)
    return shown_list(
        await stored.ask(
            tenant,
            lambda objects: objects.listed("completion", like, query),
            ObjectList([], False),
            state_of(request.scope).body.add,
        )
    )


@router.get(_ONE)
async def show_completion(request: Request) -> Response:
    return await COMPLETION.show(request)


@router.post(_ONE, openapi_extra=takes(MetadataChange))
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


def _like(request: Request) -> Json:
    pairs = [(_LABEL.fullmatch(k), v) for k, v in request.query_params.items()]
    metadata = {found[1]: value for found, value in pairs if found}
    if len(metadata) > MAX_LABELS:
        raise InvalidRequest(f"metadata: ask for at most {MAX_LABELS} pairs", "metadata")
    return {"metadata": metadata, "model": request.query_params.get("model") or None}
