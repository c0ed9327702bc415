"""One walk from a request to the engine and back, for every dialect that asks for an answer.

authenticate -> read the body -> recall, translate, validate -> find the session (here)
-> wait for a slot -> open the engine -> relay its answer          (gateway.relay.turn_response)

A dialect is an ``Operation``: how its body becomes a body that engines know, and how the engine's
answer becomes one of its own. Where the translation needs what is stored, the operation recalls it
first; where the answer is to be stored, the translation says how it is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.base import Engine, SessionRef
from engines.openai.errors import unknown_model
from engines.openai.requests import ChatRequest, CompletionRequest, Json, parse_json
from gateway.body import read_json_body
from gateway.context import Gateway, caller_of, gateway_of
from gateway.front import request_id_of
from gateway.identity.known_chats import message_chain
from gateway.identity.names import named_session
from gateway.keys import Tenant
from gateway.relay.answer_format import AnswerFormat, AsItIs, Keep
from gateway.relay.turn_response import TurnRequest, TurnResponse

T = TypeVar("T")

LARGE_BODY_BYTES = 256 << 10  # some milliseconds of work

# Fields that only the gateway may set for an engine, and names of sessions, which it has read.
_PRIVATE_FIELDS = frozenset(
    {"cache_salt", "conversation", "kv_hints", "kv_transfer_params", "previous_response_id"}
    | {"priority", "prompt_cache_key", "request_id", "session_id", "vllm_xargs"}
)


class Translated(NamedTuple):
    """A request of some dialect, as engines know it."""

    raw: Json  # the body for the engine; its ``model`` is what the client asked for
    answer: AnswerFormat
    keep: Keep | None = None  # None: nothing of the answer is stored


# Makes a body that engines know of the client's; raises ``InvalidRequest``.
Translate: TypeAlias = Callable[[Json], Translated]


def as_it_is(raw: Json) -> Translated:
    """Take a body that engines know as it stands."""
    return Translated(raw, AsItIs())


class Operation(msgspec.Struct, frozen=True):
    """One kind of request for an answer."""

    name: str  # OpenTelemetry's
    path: str  # the engine's
    validate: Callable[[Json], ChatRequest | CompletionRequest]
    # The messages that a chat without an id is recognised by. Called after ``validate``.
    messages: Callable[[Json], list[object]]
    translate: Translate = as_it_is
    # Looks up what a body refers to, and makes the translation of this one request. It may change
    # the body: what names a session there is read afterwards. Raises ``InvalidRequest``.
    recall: Callable[[Gateway, Tenant, Json], Awaitable[Translate]] | None = None


class CheckedRequest(NamedTuple):
    """A request whose body was parsed, translated and validated, each once."""

    raw: Json
    model: str
    session_id: str | None  # None: the client gave none
    chain: Sequence[bytes]  # then its chat is recognised by these
    answer: AnswerFormat
    keep: Keep | None


async def accept(request: Request, operation: Operation) -> Response:
    """Check a request, find its session, and make the response that will serve it.

    Raises:
        InvalidRequest: the request cannot be served as it stands.
        EngineUnavailable: there is no engine, or none again in time.
    """
    gateway = gateway_of(request)
    tenant = caller_of(request)
    await gateway.served_soon()  # before the body is read: a request that waits holds no memory
    body = await read_json_body(request, gateway.config)
    said = await _beside(body, partial(parse_json, body))
    translate = operation.translate
    if operation.recall is not None:
        translate = await operation.recall(gateway, tenant, said)
    check = partial(_check, operation, translate, tenant, request.headers, said)
    asked = await _beside(body, check)
    asked.raw["model"] = _served_name(gateway, asked.model)
    _even_out(asked.raw, gateway.served.max_context)
    session = _session(gateway, tenant, asked)
    for_engine = await _beside(body, partial(_encode, gateway.engine, asked.raw, session))
    turn = TurnRequest(operation.name, operation.path, session, for_engine)
    request_id = request_id_of(request.scope)
    return TurnResponse(gateway, turn, request_id, asked.answer, asked.keep)


async def _beside(body: bytes, work: Callable[[], T]) -> T:
    """Do ``work`` on a body; on a thread if the body is large, so that streams go on meanwhile."""
    return await asyncio.to_thread(work) if len(body) > LARGE_BODY_BYTES else work()


def _check(
    operation: Operation,
    translate: Translate,
    tenant: Tenant,
    headers: Mapping[str, str],
    asked: Json,
) -> CheckedRequest:
    raw, answer, keep = translate(asked)
    model = operation.validate(raw).model
    session_id = named_session(headers, asked)
    chain = [] if session_id else message_chain(tenant.salt, operation.messages(raw))
    for name in _PRIVATE_FIELDS & raw.keys():
        del raw[name]
    return CheckedRequest(raw, model, session_id, chain, answer, keep)


def _encode(engine: Engine, raw: Json, session: SessionRef) -> bytes:
    return msgspec.json.encode(engine.prepare_body(raw, session))


def _even_out(raw: Json, max_context: int) -> None:
    """Take out what engines answer differently to, where OpenAI's meaning is plain.

    Options of a stream mean nothing without one. A chat's answer that may be as long as the context
    may be as long as there is room.
    """
    if not raw.get("stream"):
        raw.pop("stream_options", None)
    if "messages" in raw:
        for name in ("max_tokens", "max_completion_tokens"):
            if (raw.get(name) or 0) >= max_context:
                del raw[name]


def _served_name(gateway: Gateway, asked: str) -> str:
    served = gateway.served.model
    if not gateway.config.means_served(asked, served):
        raise unknown_model(asked[:100], served)
    return served


def _session(gateway: Gateway, tenant: Tenant, asked: CheckedRequest) -> SessionRef:
    session_id = asked.session_id
    if session_id is None:
        session_id = gateway.chats.identify(tenant, asked.chain, partial(gateway.knows, tenant))
    return gateway.session(tenant, session_id)
