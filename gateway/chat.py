"""POST /v1/chat/completions and /v1/completions: one walk from the request to the engine and back.

authenticate -> read the body -> validate -> find the session      (here)
-> wait for a place -> open the engine -> relay its answer         (gateway.turn)
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
from engines.openai import (
    ChatRequest,
    CompletionRequest,
    Json,
    parse_json,
    validate_chat,
    validate_completion,
)
from engines.openai_errors import unknown_model
from gateway.body import read_body
from gateway.context import Gateway, caller_of, gateway_of
from gateway.front import request_id_of
from gateway.identity import message_chain, named_session
from gateway.keys import Tenant
from gateway.turn import TurnResponse

router = APIRouter()
T = TypeVar("T")

LARGE_BODY_BYTES = 256 << 10  # some milliseconds of work

# What only the gateway may tell an engine, and names of a session that it has read already.
_PRIVATE_FIELDS = frozenset(
    {"cache_salt", "conversation", "kv_hints", "kv_transfer_params", "previous_response_id"}
    | {"priority", "prompt_cache_key", "request_id", "session_id", "vllm_xargs"}
)


class Operation(msgspec.Struct, frozen=True):
    """What differs between the two kinds of completions."""

    name: str  # OpenTelemetry's
    path: str
    validate: Callable[[Json], ChatRequest | CompletionRequest]
    # What a chat without an id is recognised by. Asked after ``validate``.
    said: Callable[[Json], list[object]]


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


class Asked(NamedTuple):
    """A request that was understood."""

    raw: Json
    model: str
    session_id: str | None  # where the client gave one
    chain: Sequence[bytes]  # else what its chat is recognised by


async def accept(request: Request, operation: Operation) -> Response:
    """Everything that can be said of a request before the engine is asked."""
    gateway = gateway_of(request)
    tenant = caller_of(request)
    await gateway.served_soon()  # before the body is read: whoever waits here holds no memory
    body = await read_body(request, gateway.config)
    asked = await _beside(body, partial(_understand, operation, tenant, request.headers, body))
    asked.raw["model"] = _served_name(gateway, asked.model)
    session = _session(gateway, tenant, asked)
    for_engine = await _beside(body, partial(_encode, gateway.engine, asked.raw, session))
    request_id = request_id_of(request.scope)
    return TurnResponse(gateway, operation.name, operation.path, session, for_engine, request_id)


async def _beside(body: bytes, work: Callable[[], T]) -> T:
    """Do ``work`` on a body, a large one beside the event loop: streams go on meanwhile."""
    return await asyncio.to_thread(work) if len(body) > LARGE_BODY_BYTES else work()


def _understand(
    operation: Operation, tenant: Tenant, headers: Mapping[str, str], body: bytes
) -> Asked:
    raw = parse_json(body)
    model = operation.validate(raw).model
    session_id = named_session(headers, raw)
    chain = [] if session_id else message_chain(tenant.salt, operation.said(raw))
    for name in _PRIVATE_FIELDS & raw.keys():
        del raw[name]
    return Asked(raw, model, session_id, chain)


def _encode(engine: Engine, raw: Json, session: SessionRef) -> bytes:
    return msgspec.json.encode(engine.prepare_body(raw, session))


def _served_name(gateway: Gateway, asked: str) -> str:
    served = gateway.served.model
    if asked != served and asked not in gateway.config.model_aliases:
        raise unknown_model(asked[:100], served)
    return served


def _session(gateway: Gateway, tenant: Tenant, asked: Asked) -> SessionRef:
    session_id = asked.session_id
    if session_id is None:
        session_id = gateway.chats.identify(tenant, asked.chain, partial(gateway.knows, tenant))
    return gateway.session(tenant, session_id)
