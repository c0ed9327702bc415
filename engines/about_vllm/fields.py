"""Names a request's tenant and session in vLLM's own fields of a request.

``cache_salt`` enters the hash of every block, so that no tenant ever hits another's prefix.
``kv_transfer_params`` is vLLM's field for its connector; ours names tenant and session there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstore.session import SessionRef

PARAMS_FIELD: Final = "thermocline"


def with_session(body: Mapping[str, object], session: SessionRef) -> dict[str, object]:
    """The client's body with tenant and session set by us, in place of its own such fields."""
    names = {"tenant": session.tenant, "session": session.id}
    return {
        **body,
        "cache_salt": session.salt.hex(),
        "kv_transfer_params": {PARAMS_FIELD: names},
    }
