"""The account of every route and verb: its share of its key's limits, and the bound on its work.

A request is charged once, when its caller is known (``context.caller_of``) and before its body is
read. A route without an account cannot be served, and ``tests/architecture`` finds it before that.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from starlette.types import Scope


class Work(Enum):
    """The place where a request's work is done, and the bound that is known before it begins."""

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
    STREAM = "one of `gateway.max_event_streams` places of its tenant, with a bounded queue"


class Account(NamedTuple):
    """One request's share of its key's limits, and the bound on the rest of its work."""

    work: Work
    requests: float = 0.0  # of the key's ``requests_per_minute``; 0: not counted
    # True: it takes one of the key's ``concurrent_requests`` until its answer has ended, and has to
    # wait while the key owes tokens.
    computes: bool = False
    body: bool = False  # its body is read, and counts in ``gateway.max_bodies_bytes``


_OPEN: Final = Account(Work.FIXED)  # no key is needed
_ADMIN: Final = Account(Work.FIXED)
_ADMIN_CHANGE: Final = Account(Work.FIXED, body=True)
_TABLE: Final = Account(Work.TABLE, 0.1)
_READ: Final = Account(Work.STORED, 0.1)
_WRITE: Final = Account(Work.STORED, 0.5, body=True)
_VERB: Final = Account(Work.VERB, 0.5, body=True)
_TURN: Final = Account(Work.TURN, 1.0, computes=True, body=True)
_RECALL: Final = Account(Work.RECALL, 1.0, computes=True, body=True)
_QUESTION: Final = Account(Work.QUESTION, 1.0, computes=True, body=True)

# By the name of the route's function, which is also its label in the metrics.
ACCOUNTS: Final[dict[str, Account]] = {
    "chat_completions": _TURN,
    "completions": _TURN,
    "messages": _TURN,
    "create_response": _RECALL,
    "compact_conversation": _RECALL,
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
    "events": Account(Work.STREAM, 0.1),
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

# Questions of the gateway to an engine (``engines.wire``), by the verb's tag; each has a deadline.
VERBS: Final[dict[str, str]] = {
    "hello": "once for each connection, by its holder of the token",
    "demote": "a user's request or a sweep, one at a time for each session",
    "prefetch": "a user's request, one at a time for each session; the engine bounds its restores",
    "pin": "a user's request; the engine bounds the pinned bytes",
    "unpin": "a user's request",
    "forget": "a user's request or a sweep, one at a time for each session",
    "sessions": "the gateway's own, once for each connection, in pages of bounded bytes",
    "stats": "the gateway's own, at a fixed pace",
    "adopt": "the gateway's own, after a calibration",
    "set_budgets": "the gateway's own, when a model is loaded or unloaded, one at a time",
    "limit_tenants": "the gateway's own, at a fixed pace, where tenants have limits of bytes",
    "measure": "an admin's; one measurement runs at a time, in idle steps",
}


def account_of(scope: Scope) -> Account:
    """Return the account of a request that was routed."""
    return ACCOUNTS[scope["endpoint"].__name__]
