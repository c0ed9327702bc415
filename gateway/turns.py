"""One walk from a request to the engine and back, for every dialect that asks for an answer.

authenticate -> read the body -> translate and validate -> find the session      (here)
-> wait for a slot -> open the engine -> relay its answer          (gateway.relay.turn_response)

A dialect is an ``Operation``: how its body becomes a body that engines know, and how the engine's
answer becomes one of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.base import Engine, SessionRef
from engines.openai.errors import unknown_model
from engines.openai.requests import ChatRequest, CompletionRequest, Json, parse_json
from gateway.body import read_json_body
from gateway.context import Gateway, caller_of, gateway_of
from gateway.edge.body_budget import LARGE_BODY_BYTES, check_weight
from gateway.front import request_id_of
from gateway.identity.known_chats import message_chain
from gateway.identity.names import named_session
from gateway.keys import Tenant
from gateway.relay.answer_format import AnswerFormat, AsItIs
from gateway.relay.turn_response import TurnResponse

T = TypeVar("T")

# Fields that only the gateway may set for an engine, and names of sessions, which it has read.
_PRIVATE_FIELDS = frozenset(
    {"cache_salt", "conversation", "kv_hints", "kv_transfer_params", "previous_response_id"}
    | {"priority", "prompt_cache_key", "request_id", "session_id", "vllm_xargs"}
)


class Translated(NamedTuple):
    """A request of some dialect, as engines know it."""

    raw: Json  # the body for the engine; its ``model`` is what the client asked for
    answer: AnswerFormat


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
    # Makes a body for ``path`` of the client's; raises ``InvalidRequest``.
    translate: Callable[[Json], Translated] = as_it_is


class CheckedRequest(NamedTuple):
    """A request whose body was parsed, translated and validated, each once."""

    raw: Json
    model: str
    session_id: str | None  # None: the client gave none
    chain: Sequence[bytes]  # then its chat is recognised by these
    answer: AnswerFormat


async def accept(request: Request, operation: Operation) -> Response:
    """Check a request, find its session, and make the response that will serve it.

    Raises:
        InvalidRequest: the request cannot be served as it stands.
        Refused: the caller's key, or all bodies together, have what they may have.
        EngineUnavailable: there is no engine, or none again in time.
    """
    gateway = gateway_of(request)
    tenant = caller_of(request)
    gateway.limits.enter(tenant, request.scope)
    await gateway.served_soon()  # before the body is read: a request that waits holds no memory
    body = await read_json_body(request, gateway.config)
    async with gateway.bodies.parsing(len(body)):
        asked = await _beside(body, partial(_check, operation, tenant, request.headers, body))
        asked.raw["model"] = _served_name(gateway, asked.model)
        session = _session(gateway, tenant, asked)
        for_engine = await _beside(body, partial(_encode, gateway.engine, asked.raw, session))
    request_id = request_id_of(request.scope)
    return TurnResponse(
        gateway, operation.name, operation.path, session, for_engine, request_id, asked.answer
    )


async def _beside(body: bytes, work: Callable[[], T]) -> T:
    """Do ``work`` on a body; on a thread if the body is large, so that streams go on meanwhile."""
    return await asyncio.to_thread(work) if len(body) > LARGE_BODY_BYTES else work()


def _check(
    operation: Operation, tenant: Tenant, headers: Mapping[str, str], body: bytes
) -> CheckedRequest:
    check_weight(body)
    asked = parse_json(body)
    raw, answer = operation.translate(asked)
    model = operation.validate(raw).model
    session_id = named_session(headers, asked)
    chain = [] if session_id else message_chain(tenant.salt, operation.messages(raw))
    for name in _PRIVATE_FIELDS & raw.keys():
        del raw[name]
    return CheckedRequest(raw, model, session_id, chain, answer)


def _encode(engine: Engine, raw: Json, session: SessionRef) -> bytes:
    return msgspec.json.encode(engine.prepare_body(raw, session))


def _served_name(gateway: Gateway, asked: str) -> str:
    served = gateway.served.model
    if asked != served and asked not in gateway.config.model_aliases:
        raise unknown_model(asked[:100], served)
    return served


def _session(gateway: Gateway, tenant: Tenant, asked: CheckedRequest) -> SessionRef:
    session_id = asked.session_id
    if session_id is None:
        session_id = gateway.chats.identify(tenant, asked.chain, partial(gateway.knows, tenant))
    gateway.check_new_session(tenant, session_id)
    return gateway.session(tenant, session_id)
