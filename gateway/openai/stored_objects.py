"""What can be done with any kind of stored object: show, label anew, delete it, list its items.

An object is found by the caller's tenant and the id in the request's path; whatever is not there,
or is another tenant's, is the same 404.
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
from gateway.body import parsed
from gateway.context import caller_of, gateway_of
from gateway.openai.lists import query_of, shown, shown_list
from gateway.stored.shelf import Entry, Kind, Shelf

T = TypeVar("T")
MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]
MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], msgspec.Meta(max_length=16)]
_SHOWN = 128  # characters of an id in an error


class MetadataChange(msgspec.Struct, frozen=True):
    """The body of a request that labels an object anew."""

    metadata: Metadata | None


class StoredKind(NamedTuple):
    """One kind of stored object, and what can be done with it."""

    kind: Kind
    words: str  # as errors begin
    deleted_as: str  # ``object`` in the answer to a DELETE

    @property
    def param(self) -> str:
        """The name of the id, in paths and errors."""
        return f"{self.kind}_id"

    @property
    def code(self) -> str:
        """The code of the error that nothing was found."""
        return f"{self.kind}_not_found"

    async def ask(self, request: Request, work: Callable[[Shelf, str, str], T | None]) -> T:
        """Ask the store for something, by tenant and id. Raises ``InvalidRequest``, 404."""
        tenant, id = caller_of(request), request.path_params[self.param]
        stored = gateway_of(request).stored
        found = await stored.ask(lambda shelf: work(shelf, tenant.name, id), None)
        if found is None:
            raise self._unknown(request)
        return found

    def _unknown(self, request: Request) -> InvalidRequest:
        item = request.path_params.get("item_id")
        what = f"Item {item[:_SHOWN]!r} of {self.words.lower()}" if item else self.words
        message = f"{what} {request.path_params[self.param][:_SHOWN]!r} not found."
        return InvalidRequest(message, self.param, self.code, 404)

    async def entry(self, request: Request) -> Entry:
        """Find the object. Raises ``InvalidRequest``, 404."""
        return await self.ask(request, lambda shelf, *of: shelf.get(of[0], self.kind, of[1]))

    async def show(self, request: Request) -> Response:
        return shown((await self.entry(request)).body)

    async def delete(self, request: Request) -> Response:
        """Remove the object and its items, for good."""
        await self.ask(request, lambda shelf, *of: shelf.delete(of[0], self.kind, of[1]) or None)
        id = request.path_params[self.param]
        return shown({"id": id, "object": self.deleted_as, "deleted": True})

    async def label(self, request: Request) -> Response:
        """Replace the object's metadata."""
        caller_of(request)  # before the body is read
        change = checked(await json_of(request), MetadataChange)

        def work(shelf: Shelf, tenant: str, id: str) -> bytes | None:
            entry = shelf.get(tenant, self.kind, id)
            if entry is None:
                return None
            labelled = {**msgspec.json.decode(entry.body), "metadata": change.metadata or {}}
            body = msgspec.json.encode(labelled)
            return body if shelf.change(tenant, self.kind, id, body) else None

        return shown(await self.ask(request, work))

    async def list_items(self, request: Request, *, ascending: bool) -> Response:
        """List the object's items; ``ascending`` is the order if the request names none."""
        caller_of(request)
        query = query_of(request, ascending=ascending)
        return shown_list(
            await self.ask(request, lambda shelf, *of: shelf.items(of[0], self.kind, of[1], query))
        )


async def json_of(request: Request) -> Json:
    """Read a body; none at all is an empty object."""
    async with parsed(gateway_of(request), request, empty=b"{}") as body:
        return body.json
