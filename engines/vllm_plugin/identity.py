"""Reads from vLLM's request which session it belongs to, and its answer id.

The gateway puts tenant and session into the request's ``kv_transfer_params``, vLLM's own field for
its connector, and the tenant's salt into ``cache_salt``, which vLLM hashes into every block. A
request without them is named by vLLM's ``session_id``, for people who use the plug-in without the
gateway. A request that names no session may be restored by content, but is not saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final, Protocol

from engines.about_vllm.fields import PARAMS_FIELD
from engines.host.tenant_line import Payer
from kvstore.session import SessionRef

# Who asks, in vLLM's server: each request is served by a task of its own.
NOBODY: Final = Payer()
PAYER: Final = ContextVar("PAYER", default=NOBODY)
# The answer id within a request's id names to the HTTP server the answer that a report belongs to.
ANSWER_ID_PREFIX: Final = "tcm"
TICKET_FIELD: Final = "ticket"
_MARK: Final = re.compile(ANSWER_ID_PREFIX + r"[0-9a-f]{24}")
# The weight of the tenant's share follows the answer id.
_WEIGHT: Final = re.compile(ANSWER_ID_PREFIX + r"[0-9a-f]{24}w([0-9]{1,7})")


class IncomingRequest(Protocol):
    """The fields of ``vllm.v1.request.Request`` that are read here."""

    request_id: str
    session_id: str | None
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any


def session_of(request: IncomingRequest) -> SessionRef | None:
    """The session that the request names; None if it names none, or its KV must not be stored.

    vLLM's hash knows an adapter by its name only, so KV computed with adapters is never stored.
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
    """True if the client itself, and not the gateway, has put a salt into the request."""
    return bool(request.cache_salt) and PARAMS_FIELD not in (request.kv_transfer_params or {})


def ticket_of(request: IncomingRequest) -> str:
    """The ticket of a request that measures; "" for all others."""
    ours = (request.kv_transfer_params or {}).get(PARAMS_FIELD)
    ticket = ours.get(TICKET_FIELD) if isinstance(ours, Mapping) else None
    return ticket if isinstance(ticket, str) else ""


def answer_id_of(request_id: str) -> str | None:
    """The answer id that the middleware has put into the request's id; None if it has not."""
    found = _MARK.search(request_id)
    return found.group() if found else None


def marked_id(answer_id: str, weight: int) -> str:
    """Make the request id that carries an answer id and a weight."""
    return f"{answer_id}w{weight}"


def weight_of(request_id: str) -> int:
    """The weight of the share that a request takes; 1 if its id does not say."""
    found = _WEIGHT.search(request_id)
    return max(1, int(found[1])) if found else 1
