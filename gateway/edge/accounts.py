"""What requests may take: each route's share of its key's limits, and the bytes of all bodies.

A request is charged once, when its caller is known (``context.caller_of``) and before its body is
read. A route without an account cannot be served, and ``tests/architecture`` finds it before that.

A body counts by the bytes that have come, not by those that it declares, until its turn is called:
through the waiting line, but not while the engine computes. Questions that are no turn have no
line here, and count until they are answered. Stored objects that a request recalls count as its
body does. One tenant's leave room for others.
Parsed, a body of tiny values takes many times its bytes, so large ones are parsed one after the
other, and how much they may become is known before that.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Final, NamedTuple

from starlette.types import Scope

from engines.openai.errors import InvalidRequest
from gateway.errors import Failure, RequestRefused

BODY_SHARE = "body_share"  # where a request's share is in the scope's state
LARGE_BODY_BYTES = 256 << 10  # some milliseconds of work
# The most that a parsed body may weigh, in units of about 64 bytes: a number or a text is 1.
MAX_WEIGHT = 1 << 20
_WEIGHTS = {b",": 1, b"[": 4, b"{": 8}
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_FULL = Failure(
    503, "This server is reading too much at once. Try again later.", None, "bodies_full", 1.0
)


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
    SNAPSHOT = "a snapshot that is made once a second at most for all readers of a tenant"


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
    "show_snapshot": Account(Work.SNAPSHOT, 0.01),
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


def account_of(scope: Scope) -> Account:
    """Return the account of a request that was routed."""
    return ACCOUNTS[scope["endpoint"].__name__]


class BodyBudget:
    """The bytes of all bodies that are held at once. Runs on the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_of_one = max_bytes - max_bytes // 4  # a quarter is for others than one tenant
        self._of: Counter[str] = Counter()  # bytes of each tenant
        self._parsing = asyncio.Semaphore(1)
        self.unpacking = asyncio.Semaphore(
            1
        )  # held while one of them is, see ``content_encodings``
        self.nbytes = 0

    def take(self, tenant: str, nbytes: int) -> None:
        """Count bytes that have come. Raises ``RequestRefused`` (503) where there is no room."""
        if self.nbytes + nbytes > self._max_bytes or self._of[tenant] + nbytes > self._max_of_one:
            raise RequestRefused(_FULL)
        self.nbytes += nbytes
        self._of[tenant] += nbytes

    def give_back(self, tenant: str, nbytes: int) -> None:
        """Count bytes no longer that ``take`` has counted."""
        self.nbytes -= nbytes
        self._of[tenant] -= nbytes
        if not self._of[tenant]:
            del self._of[tenant]

    @asynccontextmanager
    async def parsing(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until no other large body is parsed, if one of ``nbytes`` is large."""
        if nbytes <= LARGE_BODY_BYTES:
            yield
            return
        async with self._parsing:
            yield


class BodyShare:
    """The share of the budget that one request has; ``give_back`` may be called twice."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._nbytes = 0
        self.tenant = ""  # the owner of the body; set before the first byte is read

    def grow(self, nbytes: int) -> None:
        """Have ``nbytes`` in all, if that is more than now. Raises ``RequestRefused`` (503)."""
        if nbytes > self._nbytes:
            self._budget.take(self.tenant, nbytes - self._nbytes)
            self._nbytes = nbytes

    def add(self, nbytes: int) -> None:
        """Have ``nbytes`` more. Raises ``RequestRefused`` (503)."""
        self.grow(self._nbytes + nbytes)

    def give_back(self) -> None:
        """Count the body no longer: it was answered, or another part of the server holds it."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._budget.give_back(self.tenant, nbytes)


def body_share_of(scope: Scope) -> BodyShare:
    """Return what a request has of the budget of all bodies; ``FrontMiddleware`` has made it."""
    share = scope["state"][BODY_SHARE]
    assert isinstance(share, BodyShare)
    return share


def check_weight(*bodies: bytes, what: str = "The body") -> None:
    """Refuse large JSON that would become too much when it is parsed.

    Raises:
        InvalidRequest: 400, it has too many values.
    """
    if sum(map(len, bodies)) <= LARGE_BODY_BYTES or sum(map(_weight, bodies)) <= MAX_WEIGHT:
        return
    if sum(_weight(_TEXTS.sub(b"", x)) for x in bodies) > MAX_WEIGHT:  # most was not inside texts
        raise InvalidRequest(f"{what} has too many values.", code="too_many_values")


def _weight(body: bytes) -> int:
    return sum(body.count(mark) * weight for mark, weight in _WEIGHTS.items())
