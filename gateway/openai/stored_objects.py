"""The routes of all kinds of stored objects: show, delete, replace metadata, list the items.

An object is found by the caller's tenant and the id in the path. An object of another tenant and
one that does not exist get the same 404.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json
from engines.openai.requests import checked
from gateway.request.body import parsed
from gateway.request.callers import charged_caller, gateway_of, state_of
from gateway.request.routing import json_response, limit_of
from gateway.stored.objects import ObjectList, Objects, Query
from gateway.stored.rows import Kind
from gateway.stored.table import Steps

MAX_ROWS = 100
T = TypeVar("T")
MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]
MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], msgspec.Meta(max_length=16)]
_SHOWN = 128  # characters of an id in an error


def query_of(request: Request, *, ascending: bool) -> Query:
    """Read ``limit``, ``after`` and ``order`` of a query.

    Args:
        ascending: the order if the query names none.

    Raises:
        InvalidRequest: one of the three is malformed.
    """
    given = request.query_params
    order = given.get("order") or ("asc" if ascending else "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: use asc or desc", "order")
    return Query(limit_of(request, 20, MAX_ROWS, 0), given.get("after") or None, order == "asc")


def shown_list(page: ObjectList) -> Response:
    """Answer with a page of bodies as they were stored.

    ``has_more`` is never true for a page without rows: a client asks for the next page by its last
    row, and without one it would begin again, for ever.
    """
    ids = [x.id for x in page.rows]
    return json_response(
        {
            "object": "list",
            "data": [msgspec.Raw(x.body) for x in page.rows],
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": page.more and bool(ids),
        }
    )


class MetadataChange(msgspec.Struct, frozen=True):
    """The body of a request that replaces an object's metadata."""

    metadata: Metadata | None


class StoredKind(NamedTuple):
    """One kind of stored object, and the handlers of its routes."""

    kind: Kind
    words: str  # the beginning of "... not found"
    deleted_as: str  # the field ``object`` in the answer to a DELETE

    @property
    def param(self) -> str:
        """The name of the id in paths and errors."""
        return f"{self.kind}_id"

    @property
    def code(self) -> str:
        """The code of the error for an object that does not exist."""
        return f"{self.kind}_not_found"

    async def ask(self, request: Request, work: Callable[[Objects, str], Steps[T | None]]) -> T:
        """Run ``work`` on the caller's objects, with the id in the path, and return its result.

        The bytes of the objects count in the budget of all bodies.

        Raises:
            InvalidRequest: 404, ``work`` returned None or False: the object does not exist.
            RequestRefused: 503, the bodies of all requests are too large together.
        """
        tenant, id = charged_caller(request).name, request.path_params[self.param]
        hold = state_of(request.scope).body.add
        found = await gateway_of(request).stored.ask(tenant, lambda x: work(x, id), None, hold)
        if found is None or found is False:
            raise self._unknown(request)
        return found

    def _unknown(self, request: Request) -> InvalidRequest:
        item = request.path_params.get("item_id")
        what = f"Item {item[:_SHOWN]!r} of {self.words.lower()}" if item else self.words
        message = f"{what} {request.path_params[self.param][:_SHOWN]!r} not found."
        return InvalidRequest(message, self.param, self.code, 404)

    async def body(self, request: Request) -> bytes:
        """Return the object's JSON. Raises ``InvalidRequest`` (404) if it does not exist."""
        return await self.ask(request, lambda objects, id: objects.show(self.kind, id))

    async def require(self, request: Request) -> None:
        """Raise ``InvalidRequest`` (404) if the object does not exist."""
        await self.ask(request, lambda objects, id: objects.page(self.kind, id, Query(0)))

    async def show(self, request: Request) -> Response:
        return json_response(await self.body(request))

    async def delete(self, request: Request) -> Response:
        """Remove the object and its items, for good."""
        await self.ask(request, lambda objects, id: objects.delete(self.kind, id))
        id = request.path_params[self.param]
        return json_response({"id": id, "object": self.deleted_as, "deleted": True})

    async def label(self, request: Request) -> Response:
        """Replace the object's metadata."""
        charged_caller(request)  # before the body is read
        metadata = checked(await json_of(request), MetadataChange).metadata or {}
        return json_response(
            await self.ask(request, lambda objects, id: objects.relabel(self.kind, id, metadata))
        )

    async def list_items(self, request: Request, *, ascending: bool) -> Response:
        """List the object's items; ``ascending`` is the order if the request names none."""
        charged_caller(request)
        query = query_of(request, ascending=ascending)
        return shown_list(
            await self.ask(request, lambda objects, id: objects.page(self.kind, id, query))
        )


async def json_of(request: Request) -> Json:
    """Return the request's body as JSON; an empty body counts as {}."""
    async with parsed(gateway_of(request), request, empty=b"{}") as body:
        return body.json
