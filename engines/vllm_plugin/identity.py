"""Whose turn a request of vLLM's is.

The gateway puts tenant and session into the request's ``kv_transfer_params``, vLLM's own field for
its connector, and the tenant's salt into ``cache_salt``, which vLLM hashes into every block. Of a
request without them vLLM's ``session_id`` is taken, for people who use the plug-in without the
gateway. A request that names no session may be restored by content, but is not saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Protocol

from engines.vllm_fields import PARAMS_FIELD
from kvstore.records import SessionRef

# A mark in the request id tells the HTTP side which answer a report belongs to.
MARK_PREFIX: Final = "tcm"
_MARK: Final = re.compile(MARK_PREFIX + r"[0-9a-f]{24}")


class IncomingRequest(Protocol):
    """As much of ``vllm.v1.request.Request`` as is needed here."""

    request_id: str
    session_id: str | None
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any


def session_of(request: IncomingRequest) -> SessionRef | None:
    """None: it names none, or must not be kept.

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


def mark_of(request_id: str) -> str | None:
    found = _MARK.search(request_id)
    return found.group() if found else None
