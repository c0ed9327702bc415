"""Reads request bodies: JSON of bounded size and weight, in bounded time.

Routes that ask the engine read their bodies by ``body_for_engine``, all others by ``parsed``.
"""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from engines.http import read_body, while_client_stays
from engines.openai.errors import InvalidRequest
from engines.openai.requests import Json
from gateway.config import GatewayConfig
from gateway.edge.bodies import (
    LARGE_BODY_BYTES,
    WholeText,
    check_weight,
    encoding_of,
    parse_whole,
    unpacked,
)
from gateway.edge.key_limits import cost_of
from gateway.gateway import Gateway
from gateway.models import ServedModel
from gateway.request.callers import enter, gateway_of, state_of

T = TypeVar("T")


class ParsedBody:
    """A parsed body, and its size in bytes, including the stored items that it recalls."""

    def __init__(
        self, request: Request, json: Json, nbytes: int, alone: AsyncExitStack, model: ServedModel
    ) -> None:
        """
        Args:
            json: the parsed body.
            nbytes: its size.
            alone: contexts that are left when the body is not used any more.
            model: the model that the body names.
        """
        self.model = model
        self.json = json
        self.nbytes = nbytes
        self._request = request
        self._alone = alone
        self._is_alone = nbytes > LARGE_BODY_BYTES

    @property
    def room(self) -> int:
        """The number of bytes that it may still recall, within ``max_body_bytes`` in all."""
        return gateway_of(self._request).config.max_body_bytes - self.nbytes

    def recall(self, nbytes: int) -> None:
        """Count bytes that it is about to recall. Raises ``RequestRefused`` (503)."""
        state_of(self._request.scope).body.add(nbytes)
        self.nbytes += nbytes

    async def recalled(self) -> None:
        """Wait until the recalled items may be parsed: only one large body is parsed at a time."""
        if self.nbytes > LARGE_BODY_BYTES and not self._is_alone:
            self._is_alone = True
            bodies = gateway_of(self._request).bodies
            await self._alone.enter_async_context(bodies.parsing)

    async def while_client_stays(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of ``work``. Raises ``ClientGone`` if the client leaves meanwhile."""
        return await while_client_stays(self._request.receive, work)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Call ``work``, on a thread if the body is large, so that streams go on meanwhile."""
        return await _off_loop(self.nbytes, work)


@asynccontextmanager
async def body_for_engine(
    request: Request,
    *,
    empty: bytes = b"",
    check: Callable[[ServedModel, Json], object] | None = None,
    on_wait: Callable[[ParsedBody], None] = lambda body: None,
) -> AsyncIterator[ParsedBody]:
    """Read and parse the body of a request to the engine, and have its model loaded.

    While the request waits for its model, only the bytes of its body are held: parsed, they would
    take many times the memory.

    Args:
        empty: the bytes that an empty body counts as.
        check: checks a copy of the body, which it may change, before the model is loaded, so that
            an invalid request does not load a model and unload another.
        on_wait: called after that with the body, if the request has to wait for its model.

    Raises (on entering), besides the errors of ``parsed``:
        EngineUnavailable: the model's engine is not ready, or not again in time.
        InvalidRequest: 404, there are several models, and the body names none of them.
    """
    gateway = gateway_of(request)
    only = gateway.models.only
    if only is not None:  # wait before the body is read, so that no memory is held meanwhile
        await enter(gateway, only, request)
    body = await read_json_body(request, gateway.config) or empty
    if only is None:
        named = await _off_loop(len(body), partial(_model_named, body))
        if named is _UNREAD:
            async with _parsed(gateway, request, body) as early:
                model = early.model
        else:
            model = gateway.models.meant(named, gateway.config)
        if not model.is_there:
            async with _parsed(gateway, request, body) as early:
                if check is not None:
                    await early.off_loop(partial(_check_early, check, early))
                on_wait(early)
                early.json = {}  # free it now: a thread may refer to ``early`` for a moment
        await enter(gateway, model, request)
    async with _parsed(gateway, request, body) as whole:
        yield whole


@asynccontextmanager
async def parsed(
    gateway: Gateway, request: Request, *, empty: bytes = b""
) -> AsyncIterator[ParsedBody]:
    """Read a body and parse it. Inside the context of a large body, no other is parsed.

    Args:
        empty: the bytes that an empty body counts as.

    Raises (on entering):
        RequestRefused: 503, the bodies of all requests are too large together.
        InvalidRequest: the body is no JSON object, or has too many values; see ``read_json_body``.
    """
    body = await read_json_body(request, gateway.config) or empty
    async with _parsed(gateway, request, body) as whole:
        yield whole


@asynccontextmanager
async def _parsed(gateway: Gateway, request: Request, body: bytes) -> AsyncIterator[ParsedBody]:
    async with AsyncExitStack() as alone:
        if len(body) > LARGE_BODY_BYTES:
            await alone.enter_async_context(gateway.bodies.parsing)
        whole = await _off_loop(len(body), partial(_whole, body))
        state_of(request.scope).num_replaced = whole.num_replaced
        model = gateway.models.meant(whole.json.get("model"), gateway.config)
        yield ParsedBody(request, whole.json, len(body), alone, model)


def _check_early(check: Callable[[ServedModel, Json], object], body: ParsedBody) -> None:
    check(body.model, body.json)


class _Named(msgspec.Struct):
    model: object = None


_UNREAD: Final = object()


def _model_named(body: bytes) -> object:
    """Return the ``model`` of a body; ``_UNREAD`` if that needs the more lenient ``_parsed``."""
    check_weight(body)
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _UNREAD


async def _off_loop(nbytes: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if nbytes > LARGE_BODY_BYTES else work()


def _whole(body: bytes) -> WholeText:
    check_weight(body)
    return parse_whole(body)


async def read_json_body(request: Request, config: GatewayConfig) -> bytes:
    """Read the whole body and unpack it; return it unparsed, without a byte order mark.

    Its bytes, packed and unpacked, count for the caller in the budget of all bodies, until the
    request's share of the budget is given back.

    Raises:
        RequestRefused: 503, the bodies of all requests are too large together; 415, its encoding is
            unknown.
        InvalidRequest: it takes too long (408), is too large (413), is not declared as JSON (415),
            or is not in its declared encoding (400).
    """
    assert cost_of(request.scope).body, "the cost of a route that reads a body has ``body=True``"
    encoding = _encoding(request)
    share = state_of(request.scope).body
    try:
        async with asyncio.timeout(config.body_timeout_s):
            body = await read_body(request, config.max_body_bytes, share.grow)
    except TimeoutError:
        raise InvalidRequest("The request's body took too long to arrive.", status=408) from None
    if encoding and body:
        async with gateway_of(request).bodies.unpacking:
            body = await unpacked(body, encoding, config.max_body_bytes, share.add)
    return body.removeprefix(BOM_UTF8)


def _encoding(request: Request) -> str:
    """Return the body's encoding, "" if it has none; refuse any type but JSON.

    A page of another origin can send some other types without a preflight.
    """
    if not _has_body(request):
        return ""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest("Send Content-Type: application/json.", status=415)
    return encoding_of(",".join(request.headers.getlist("content-encoding")))


def _has_body(request: Request) -> bool:
    headers = request.headers
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
