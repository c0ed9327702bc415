"""Request bodies: JSON only, of bounded size and weight, in bounded time; chats fit their template.

What asks the engine for something enters by ``body_for_engine``; what does not, by ``parsed``.

A template may refuse system messages in the middle of a chat. Nothing is moved for it. System
messages at the top instead, as some servers write them, would change the prompt from its first
tokens on: all that was computed for the conversation would be lost at every such message.
"""

from __future__ import annotations

import asyncio
import copy
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from engines.http import read_body, while_client_stays
from engines.openai.errors import InvalidRequest
from engines.openai.requests import Json
from engines.wire import TemplateRules
from gateway.config import GatewayConfig
from gateway.edge.bodies import (
    LARGE_BODY_BYTES,
    check_weight,
    encoding_of,
    parse_whole,
    unpacked,
)
from gateway.edge.key_limits import cost_of
from gateway.edge.request_state import state_of
from gateway.gateway import Gateway
from gateway.models import ServedModel
from gateway.request.callers import gateway_of

T = TypeVar("T")
_SYSTEM = ("system", "developer")


class ParsedBody:
    """A body's JSON, and the bytes that it came in, with those that it recalls."""

    def __init__(
        self,
        request: Request,
        json: Json,
        body: bytes,
        alone: AsyncExitStack,
        model: ServedModel,
    ) -> None:
        """
        Args:
            json: what the body says.
            alone: what is entered there lasts as long as the body is used.
            model: the one that the body means.
        """
        self.model = model
        self._request = request
        self._body = body
        self._alone = alone
        self._is_alone = len(body) > LARGE_BODY_BYTES
        self.json = json
        self.nbytes = len(body)

    @property
    def room(self) -> int:
        """The bytes that it may recall yet: with them it is no larger than any body may be."""
        return gateway_of(self._request).config.max_body_bytes - self.nbytes

    def recall(self, nbytes: int) -> None:
        """Count what it is about to recall. Raises ``Refused`` (503)."""
        state_of(self._request.scope).body.add(nbytes)
        self.nbytes += nbytes

    async def recalled(self) -> None:
        """Wait until the recalled items may be parsed: no other large body is, meanwhile."""
        if self.nbytes > LARGE_BODY_BYTES and not self._is_alone:
            self._is_alone = True
            bodies = gateway_of(self._request).bodies
            await self._alone.enter_async_context(bodies.parsing(self.nbytes))

    @asynccontextmanager
    async def folded(self) -> AsyncIterator[None]:
        """Hold a large body as bytes inside the context, while it waits; others are parsed.

        Parsed, each of those that wait would take many times what it counts as.
        """
        was_alone, self._is_alone = self._is_alone, False
        if was_alone:
            self.json = {}
            await self._alone.aclose()
        yield
        if was_alone:
            await self.recalled()
            self.json = await self.off_loop(partial(_parsed, self._request.scope, self._body))

    async def while_client_stays(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do ``work``, but end it when the client leaves. Raises ``ClientGone``."""
        return await while_client_stays(self._request.receive, work)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do ``work`` on it; on a thread if it is large, so that streams go on meanwhile."""
        return await _off_loop(self.nbytes, work)


@asynccontextmanager
async def body_for_engine(
    request: Request,
    *,
    empty: bytes = b"",
    check: Callable[[ServedModel, Json], object] | None = None,
    on_wait: Callable[[ParsedBody], None] = lambda body: None,
) -> AsyncIterator[ParsedBody]:
    """Read and parse the body of a request that asks the engine for something; see ``parsed``.

    Args:
        check: looks at a copy of the body before a model is loaded for it: a request that is wrong
            loads none, and unloads no other.
        on_wait: called, after that, with the body of a request that waits for its model.

    Raises (on entering), besides:
        EngineUnavailable: there is no engine for its model, or none again in time.
        InvalidRequest: 404, there are several models, and it names none of them.
    """
    gateway = gateway_of(request)
    only = gateway.models.only
    if only is not None:  # before the body is read: a request that waits holds no memory
        await gateway.enter(only, request)
    async with parsed(gateway, request, empty=empty) as body:
        if only is None:
            if not body.model.is_there:
                if check is not None:
                    await body.off_loop(partial(_check_copy, check, body))
                on_wait(body)
            async with body.folded():
                await gateway.enter(body.model, request)
        yield body


@asynccontextmanager
async def parsed(
    gateway: Gateway, request: Request, *, empty: bytes = b""
) -> AsyncIterator[ParsedBody]:
    """Read a body and parse it. While the context is held, no other large body is parsed.

    Args:
        empty: taken for a body of no bytes.

    Raises (on entering):
        RequestRefused: 503, the bodies of all requests take too much.
        InvalidRequest: it is no JSON object, or has too many values; see ``read_json_body``, too.
    """
    body = await read_json_body(request, gateway.config) or empty
    async with AsyncExitStack() as alone:
        await alone.enter_async_context(gateway.bodies.parsing(len(body)))
        json = await _off_loop(len(body), partial(_parsed, request.scope, body))
        model = gateway.models.meant(json.get("model"), gateway.config)
        parsed_body = ParsedBody(request, json, body, alone, model)
        del json  # it may be folded
        yield parsed_body


def _check_copy(check: Callable[[ServedModel, Json], object], body: ParsedBody) -> None:
    check(body.model, copy.deepcopy(body.json))


async def _off_loop(nbytes: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if nbytes > LARGE_BODY_BYTES else work()


def _parsed(scope: Scope, body: bytes) -> Json:
    check_weight(body)
    json, num_replaced = parse_whole(body)
    state_of(scope).num_replaced = num_replaced
    return json


async def read_json_body(request: Request, config: GatewayConfig) -> bytes:
    """Read the whole body, and unpack it; it is not parsed here. A byte order mark is left out.

    Its bytes count in the budget of all bodies, as its caller's, until its share is given
    back: those that came, and those that they were unpacked to.

    Raises:
        RequestRefused: 503, the bodies of all requests take too much; 415, its encoding is
            unknown.
        InvalidRequest: it takes too long (408), is too large (413), not declared as JSON (415), or
            is not what it says (400).
    """
    assert cost_of(request.scope).body, "a route that reads a body says so in its cost"
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
    """Return the body's encoding, "" if it has none.

    Types are refused that a page of a foreign origin may send without asking first (no preflight).
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


def fitted(messages: Sequence[Json], rules: TemplateRules) -> list[Json]:
    """Return the messages as the model's template takes them; none is moved.

    A system message after the first becomes a user's, with a mark. Where the template wants user
    and assistant to alternate, it is added to the message before it, and users' messages that
    follow each other are joined.
    """
    made = list(messages)
    if not rules.inline_system and any(_is_inline(messages, i) for i in range(len(messages))):
        made = _with_notes(messages, rules)
    return made if rules.repeated_users else _alternating(made)


def _with_notes(messages: Sequence[Json], rules: TemplateRules) -> list[Json]:
    made: list[Json] = []
    for i, message in enumerate(messages):
        if not _is_inline(messages, i):
            made.append(message)
            continue
        note = f"<system-reminder>\n{_text_of(message)}\n</system-reminder>"
        _add_note(made, note, rules)
    return made


def _is_inline(messages: Sequence[Json], i: int) -> bool:
    return i > 0 and messages[i].get("role") in _SYSTEM


def _text_of(message: Json) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]  # no images, those are refused
        return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in parts)
    return str(content or "")


def _add_note(made: list[Json], note: str, rules: TemplateRules) -> None:
    before = made[-1]
    if not rules.repeated_users and before["role"] in ("user", "tool"):
        made[-1] = _joined(before, {"content": note})
    else:
        made.append({"role": "user", "content": note})


def _alternating(messages: Sequence[Json]) -> list[Json]:
    """Join users' messages that follow each other."""
    made: list[Json] = []
    for message in messages:
        if made and made[-1]["role"] == message["role"] == "user":
            made[-1] = _joined(made[-1], message)
        else:
            made.append(message)
    return made


def _joined(before: Json, after: Json) -> Json:
    """Return ``before`` with the content of both: as text, or as parts if one holds an image."""
    parts = [*_parts(before), *_parts(after)]
    if all(part.get("type") == "text" for part in parts):
        return {**before, "content": f"{_text_of(before)}\n\n{_text_of(after)}"}
    return {**before, "content": parts}


def _parts(message: Json) -> list[Json]:
    content = message.get("content")
    if isinstance(content, list):
        return [part for part in content if isinstance(part, dict)]
    return [{"type": "text", "text": str(content or "")}]


def keep_reasoning(raw: Json, rules: TemplateRules) -> None:
    """Switch this on in a chat's body, unless the client sets the template's switch itself."""
    if rules.reasoning_switch:
        said = raw.get("chat_template_kwargs") or {}
        raw["chat_template_kwargs"] = {**rules.reasoning_switch, **said}
