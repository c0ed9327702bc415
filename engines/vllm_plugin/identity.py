"""Reads the session and the answer id of a request from vLLM's own fields.

The gateway puts tenant and session into the request's ``kv_transfer_params``, vLLM's own field for
its connector, and the tenant's salt into ``cache_salt``, which vLLM hashes into every block. If
vLLM serves without the gateway, vLLM's ``session_id`` names the session. A request that names no
session can use stored blocks of the same content, but is not saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final, Protocol

from engines.http import PARAMS_FIELD
from kvstore.session import SessionRef

# The middleware puts an answer id into the request's id. EngineCore's reports contain it, so that
# the HTTP server finds the answer that a report is about.
ANSWER_ID_PREFIX: Final = "tcm"
TICKET_FIELD: Final = "ticket"
# The tenant of the request that the running task answers; None = the gateway named none.
TENANT: Final[ContextVar[str | None]] = ContextVar("TENANT", default=None)
_MARK: Final = re.compile(ANSWER_ID_PREFIX + r"[0-9a-f]{24}")


class IncomingRequest(Protocol):
    """The fields of ``vllm.v1.request.Request`` that are read here."""

    request_id: str
    session_id: str | None
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any


def session_of(request: IncomingRequest) -> SessionRef | None:
    """Return the session that the request names; None if none, or its KV must not be stored.

    vLLM's block hash includes only the name of an adapter, so KV computed with adapters is never
    stored.
    """
    if request.lora_request is not None:
        return None
    ours = (request.kv_transfer_params or {}).get(PARAMS_FIELD)
    salt = (request.cache_salt or "").encode()
    if isinstance(ours, Mapping):
        tenant, session = ours.get("tenant"), ours.get("session")
        if isinstance(tenant, str) and isinstance(session, str):
            return SessionRef(tenant, session, salt)
        return None
    return SessionRef("", request.session_id, salt) if request.session_id else None


def has_own_salt(request: IncomingRequest) -> bool:
    """Return whether the client, not the gateway, has put a salt into the request."""
    return bool(request.cache_salt) and PARAMS_FIELD not in (request.kv_transfer_params or {})


def ticket_of(request: IncomingRequest) -> str:
    """Return the ticket of a measuring request; "" for all other requests."""
    ours = (request.kv_transfer_params or {}).get(PARAMS_FIELD)
    ticket = ours.get(TICKET_FIELD) if isinstance(ours, Mapping) else None
    return ticket if isinstance(ticket, str) else ""


def answer_id_of(request_id: str) -> str | None:
    """Return the answer id that the middleware has put into a request's id; None if none."""
    found = _MARK.search(request_id)
    return found.group() if found else None
