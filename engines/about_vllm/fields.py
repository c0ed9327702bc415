"""Puts a request's tenant and session into fields that vLLM's requests have.

``cache_salt`` enters the hash of every block, so that no tenant ever hits another tenant's prefix.
``kv_transfer_params`` is vLLM's field for its connector; it holds the tenant and session for ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstore.session import SessionRef

PARAMS_FIELD: Final = "thermocline"


def with_session(body: Mapping[str, object], session: SessionRef) -> dict[str, object]:
    """Return the client's body with our tenant and session; its own values are overwritten."""
    names = {"tenant": session.tenant, "session": session.id}
    return {
        **body,
        "cache_salt": session.salt.hex(),
        "kv_transfer_params": {PARAMS_FIELD: names},
    }
