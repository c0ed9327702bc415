"""What each route takes of a key's limits, and the bound on the rest of its work.

``context.count`` counts a request in its key's minute before it is routed; ``context.caller_of``
then refuses it with 429, or takes a place among the key's running requests. Both come before its
body is read. A route without a cost cannot be served, and ``tests/architecture`` finds it first.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from starlette.types import Scope


class Work(Enum):
    """Says which part of the server bounds a route's work, and by what.

    Each bound is enforced in that part. This is read by the tests and by the page of the routes.
    """

    FIXED = "little work of fixed size, on the event loop"
    TABLE = "at most 1,000 rows of the gateway's own tables, one tenant's"
    STORED = (
        "stored objects: counted in bytes and items before they are read, on a few threads that"
        " tenants take in turns"
    )
    RECALL = (
        "a turn, after the stored objects that it goes on from: these count in the budget of all"
        " bodies before they are read"
    )
    TURN = "one place in the line of its tenant; the engine ends it when the client leaves"
    QUESTION = (
        "counted in inputs and tokens before the engine begins; computed in slices, which tenants"
        " take in turns; ends when the client leaves"
    )
    VERB = "one verb to the engine about one session, with a deadline"
    SNAPSHOT = "a snapshot that is made once a second at most for all readers of a tenant"


class RouteCost(NamedTuple):
    """One request's share of its key's limits, and the bound on the rest of its work."""

    work: Work
    requests: float = 0.0  # of the key's ``requests_per_minute``; 0: not counted
    # True: it takes one of the key's ``concurrent_requests`` until its answer has ended, and has to
    # wait while the key owes tokens.
    computes: bool = False
    body: bool = False  # its body is read, and counts in the budget of all bodies


_OPEN: Final = RouteCost(Work.FIXED)  # no key is needed
_ADMIN: Final = RouteCost(Work.FIXED)
_ADMIN_CHANGE: Final = RouteCost(Work.FIXED, body=True)
_TABLE: Final = RouteCost(Work.TABLE, 0.1)
_READ: Final = RouteCost(Work.STORED, 0.1)
_WRITE: Final = RouteCost(Work.STORED, 0.5, body=True)
_VERB: Final = RouteCost(Work.VERB, 0.5, body=True)
_TURN: Final = RouteCost(Work.TURN, 1.0, computes=True, body=True)
_RECALL: Final = RouteCost(Work.RECALL, 1.0, computes=True, body=True)
_QUESTION: Final = RouteCost(Work.QUESTION, 1.0, computes=True, body=True)

# By the name of the route's function, which is also its label in the metrics.
ROUTE_COSTS: Final[dict[str, RouteCost]] = {
    "chat_completions": _TURN,
    "completions": _TURN,
    "messages": _TURN,
    "create_response": _RECALL,
    "count_input_tokens": _RECALL,
    "count_tokens": _QUESTION,
    "embeddings": _QUESTION,
    "tokenize": _QUESTION,
    "detokenize": _QUESTION,
    "list_completions": _READ,
    "show_completion": _READ,
    "update_completion": _WRITE,
    "delete_completion": _WRITE,
    "list_messages": _READ,
    "show_response": _READ,
    "delete_response": _WRITE,
    "list_input_items": _READ,
    "cancel_response": _WRITE,
    "compact_conversation": _WRITE,
    "create_conversation": _WRITE,
    "show_conversation": _READ,
    "update_conversation": _WRITE,
    "delete_conversation": _WRITE,
    "add_items": _WRITE,
    "list_items": _READ,
    "show_item": _READ,
    "delete_item": _WRITE,
    "list_models": _TABLE,
    "show_model": _TABLE,
    "list_sessions": _TABLE,
    "show_session": _TABLE,
    "demote": _VERB,
    "prefetch": _VERB,
    "pin": _VERB,
    "unpin": _VERB,
    "forget": _VERB,
    "show_snapshot": RouteCost(Work.SNAPSHOT, 0.01),
    "livez": _OPEN,
    "readyz": _OPEN,
    "health": _OPEN,
    "show_version": _OPEN,
    "metrics": _OPEN,
    "openapi": _OPEN,
    "docs": _OPEN,
    "root": _OPEN,
    "dashboard": _OPEN,
    "dashboard_file": _OPEN,
    "list_keys": _ADMIN,
    "make_key": _ADMIN_CHANGE,
    "revoke_key": _ADMIN_CHANGE,
    "show_findings": _ADMIN,
    "show_log": _ADMIN,
    "measure": _ADMIN_CHANGE,
}


def cost_of(scope: Scope) -> RouteCost:
    """Return the cost of a request that was routed."""
    return ROUTE_COSTS[scope["endpoint"].__name__]
