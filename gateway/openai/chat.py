"""POST /v1/chat/completions and /v1/completions: one walk from the request to the engine and back.

authenticate -> read the body -> validate -> find the session      (here)
-> wait for a slot -> open the engine -> relay its answer          (gateway.relay.turn_response)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.base import Engine, SessionRef
from engines.openai.errors import unknown_model
from engines.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Json,
    parse_json,
    validate_chat,
    validate_completion,
)
from gateway.body import read_json_body
from gateway.context import Gateway, caller_of, gateway_of
from gateway.front import request_id_of
from gateway.identity import message_chain, named_session
from gateway.keys import Tenant
from gateway.relay.turn_response import TurnResponse

router = APIRouter()
T = TypeVar("T")

LARGE_BODY_BYTES = 256 << 10  # some milliseconds of work

# Fields that only the gateway may set for an engine, and names of sessions, which it has read.
_PRIVATE_FIELDS = frozenset(
    {"cache_salt", "conversation", "kv_hints", "kv_transfer_params", "previous_response_id"}
    | {"priority", "prompt_cache_key", "request_id", "session_id", "vllm_xargs"}
)


class Operation(msgspec.Struct, frozen=True):
    """One of the two kinds of completions: its name, path and schema."""

    name: str  # OpenTelemetry's
    path: str
    validate: Callable[[Json], ChatRequest | CompletionRequest]
    # The messages that a chat without an id is recognised by. Called after ``validate``.
    messages: Callable[[Json], list[object]]


CHAT = Operation("chat", "/v1/chat/completions", validate_chat, lambda raw: raw["messages"])
TEXT = Operation(
    "text_completion", "/v1/completions", validate_completion, lambda raw: [raw["prompt"]]
)


async def chat_completions(request: Request) -> Response:
    return await accept(request, CHAT)


async def completions(request: Request) -> Response:
    return await accept(request, TEXT)


# Plain routes: FastAPI's own resolve dependencies, which nobody here has, for every request.
router.add_route(CHAT.path, chat_completions, methods=["POST"])
router.add_route(TEXT.path, completions, methods=["POST"])


class CheckedRequest(NamedTuple):
    """A request whose body was parsed and validated, both once."""

    raw: Json
    model: str
    session_id: str | None  # None: the client gave none
    chain: Sequence[bytes]  # then its chat is recognised by these


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
    asked = await _beside(body, partial(_check, operation, tenant, request.headers, body))
    asked.raw["model"] = _served_name(gateway, asked.model)
    session = _session(gateway, tenant, asked)
    for_engine = await _beside(body, partial(_encode, gateway.engine, asked.raw, session))
    request_id = request_id_of(request.scope)
    return TurnResponse(gateway, operation.name, operation.path, session, for_engine, request_id)


async def _beside(body: bytes, work: Callable[[], T]) -> T:
    """Do ``work`` on a body; on a thread if the body is large, so that streams go on meanwhile."""
    return await asyncio.to_thread(work) if len(body) > LARGE_BODY_BYTES else work()


def _check(
    operation: Operation, tenant: Tenant, headers: Mapping[str, str], body: bytes
) -> CheckedRequest:
    raw = parse_json(body)
    model = operation.validate(raw).model
    session_id = named_session(headers, raw)
    chain = [] if session_id else message_chain(tenant.salt, operation.messages(raw))
    for name in _PRIVATE_FIELDS & raw.keys():
        del raw[name]
    return CheckedRequest(raw, model, session_id, chain)


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
    return gateway.session(tenant, session_id)
