"""Admits requests within the limits of their key; each answer's head reports these limits.

``rates`` counts what a key uses in a minute, over all gateways that share a Redis. Tokens are
counted when an answer has ended, since their number is not known before: a key may exceed its
limit once, and has to wait afterwards. Concurrent requests are counted at this gateway only. A new
session has no row in the table before its turn has a slot; until then its id is counted here.

``ROUTE_COSTS`` has each route's share of a key's limits, and the bound on the rest of its work.
``gateway.request.callers`` charges the share before the body is read. A route without a cost cannot
be served; a test in ``tests/architecture`` finds it first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from enum import Enum
from functools import partial
from typing import Final, NamedTuple

from starlette.types import Scope

from gateway.edge.rates import AGAIN_S, Most, Rates, Taken
from gateway.errors import Failure, RequestRefused
from gateway.keys import Limits, Tenant

Headers = tuple[tuple[str, str], ...]


class KeyLimits:
    """The limits of all keys of one app. Runs on the event loop."""

    def __init__(self, usual: Limits, rates: Rates | None = None) -> None:
        """
        Args:
            usual: the limits of keys whose own lines set none.
        """
        self.usual = usual  # may be replaced at any time
        self.rates = rates or Rates()
        self._running: Counter[str] = Counter()  # requests that compute, by key
        self._coming: dict[str, Counter[str]] = {}  # by tenant: the sessions of running requests

    def of(self, tenant: Tenant) -> Limits:
        """Return the limits of the caller's key."""
        return tenant.limits or self.usual

    def has_rates(self, tenant: Tenant) -> bool:
        """Return whether the key has a limit per minute, so that ``count`` has to be called."""
        return bool(_most(self.of(tenant)))

    async def count(self, tenant: Tenant, cost: RouteCost) -> Taken:
        """Count a request in the key's minute; ``enter`` takes the result, and admits or refuses.

        Nothing is counted if the key has no limit per minute, or no place for the request.
        """
        most = _most(self.of(tenant))
        if not (most and cost.requests and self._has_place(tenant, cost)):
            return Taken()
        return await self.rates.take(_name(tenant), most, cost.requests, cost.computes)

    def enter(self, tenant: Tenant, cost: RouteCost, taken: Taken) -> KeyShare | None:
        """Admit a request; return its share, None for a route that counts nothing.

        Args:
            taken: the result of ``count``.

        Raises:
            RequestRefused: 429, a limit of the key is reached.
        """
        if not cost.requests:
            return None
        if not self._has_place(tenant, cost):
            running = self._running[_name(tenant)]
            raise _refusal(f"{running} requests of this key are running already", AGAIN_S, taken)
        if what := taken.refused:
            most = _most(self.of(tenant))[what]
            raise _refusal(f"this key may use {most} {what} a minute", taken.wait_s, taken)
        return KeyShare(self, tenant, taken, int(cost.computes))

    def _has_place(self, tenant: Tenant, cost: RouteCost) -> bool:
        at_once = self.of(tenant).concurrent_requests
        return not (cost.computes and at_once) or self._running[_name(tenant)] < at_once

    def run(self, tenant: Tenant, more: int) -> None:
        """Add ``more``, which may be negative, to the count of the key's running requests."""
        name = _name(tenant)
        self._running[name] += more
        if not self._running[name]:
            del self._running[name]

    def use_tokens(self, tenant: Tenant, number: int) -> None:
        """Count the tokens of a prompt and its answer, if the key has a limit for them."""
        if (most := self.of(tenant).tokens_per_minute) and number > 0:
            self.rates.use_tokens(_name(tenant), most, number)

    def coming(self, tenant: Tenant) -> Collection[str]:
        """Return the ids of the sessions of the tenant's running requests, known or new."""
        return self._coming.get(tenant.name, ())

    def comes(self, tenant: Tenant, session_id: str, share: KeyShare) -> None:
        """Note the session of a request until that ends."""
        self._coming.setdefault(tenant.name, Counter())[session_id] += 1
        share.on_leaving(partial(self._left, tenant.name, session_id))

    def _left(self, tenant: str, session_id: str) -> None:
        ids = self._coming[tenant]
        ids[session_id] -= 1
        if not ids[session_id]:
            del ids[session_id]
        if not ids:
            del self._coming[tenant]


class KeyShare:
    """A request's share of its key's limits; one that computes holds a place among them."""

    def __init__(self, limits: KeyLimits, tenant: Tenant, taken: Taken, num_places: int) -> None:
        self._limits = limits
        self._tenant = tenant
        self._windows = dict(taken.windows)
        self._num_places = num_places
        self._inside = True
        self._on_leaving: list[Callable[[], None]] = []
        limits.run(tenant, num_places)

    def on_leaving(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the request ends, or at once if it has ended."""
        if self._inside:
            self._on_leaving.append(then)
        else:
            then()

    def headers(self) -> Headers:
        """Return OpenAI's ``x-ratelimit-*``, as of the request's admission."""
        return _headers(Taken(self._windows))

    def used_tokens(self, number: int) -> None:
        """Count the tokens of the request's prompt and answer."""
        self._limits.use_tokens(self._tenant, number)
        if (tokens := self._windows.get("tokens")) is not None:
            self._windows["tokens"] = tokens.plus(number)

    def leave(self) -> None:
        """Give the place back. May be called twice."""
        if self._inside:
            self._inside = False
            self._limits.run(self._tenant, -self._num_places)
            for then in self._on_leaving:
                then()


def _name(tenant: Tenant) -> str:
    return tenant.key_id or tenant.name


def _most(limits: Limits) -> Most:
    both = ("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute)
    return {what: most for what, most in both if most}


def _headers(taken: Taken) -> Headers:
    return tuple(
        (f"x-ratelimit-{name}-{what}", value)
        for what, window in taken.windows.items()
        for name, value in (
            ("limit", str(window.most // window.parts)),
            ("remaining", str(window.remaining)),
            ("reset", f"{window.reset_s:.3f}s"),
        )
    )


def _refusal(why: str, wait_s: float, taken: Taken) -> RequestRefused:
    message = f"The limit of this key is reached: {why}. Try again later."
    failure = Failure(429, message, None, "rate_limit_exceeded", wait_s, _headers(taken))
    return RequestRefused(failure)


class Work(Enum):
    """The bound of a route's work, and the files that enforce it.

    The values are text for docs/reference/route-costs.md, and tests check the files' names.
    """

    FIXED = "little work of fixed size, on the event loop"
    TABLE = (
        "at most 1,000 rows of the gateway's own tables, one tenant's (`MAX_ROWS` in"
        " `gateway/sessions.py`)"
    )
    STORED = (
        "stored objects: counted in bytes and items before they are read"
        " (`gateway/stored/objects.py`), on a few threads that tenants take in turns"
        " (`gateway/stored/stored.py`)"
    )
    RECALL = (
        "a turn, and before it the reading of the stored objects that it continues: these count in"
        " the budget of all bodies before they are read (`gateway/openai/responses/history.py`,"
        " `gateway/edge/bodies.py`)"
    )
    TURN = (
        "one place in the line of its tenant (`scheduler/admission.py`); the engine ends it when"
        " the client leaves (`gateway/relay/turn_response.py`)"
    )
    QUESTION = (
        "counted in inputs and tokens before the engine begins (`engines/openai/requests.py`); one"
        " place in a line of its tenant (`scheduler/admission.py`); computed in slices, which"
        " requests take in turns (`engines/host/work_line.py`); ends when the client leaves"
        " (`gateway/relay/question.py`)"
    )
    VERB = (
        "one verb to the engine about one session, with a deadline"
        " (`engines/client/control_link.py`)"
    )
    SNAPSHOT = (
        "a snapshot that is made once a second at most for all readers of a tenant"
        " (`gateway/watch/snapshots.py`)"
    )


class RouteCost(NamedTuple):
    """One request's share of its key's limits, and the bound on the rest of its work."""

    work: Work
    requests: float = 0.0  # of the key's ``requests_per_minute``; 0: not counted
    # True: it takes one of the key's ``concurrent_requests`` until its answer has ended, and is
    # refused while the key has used up its tokens of a minute.
    computes: bool = False
    body: bool = False  # True: its body is read, and counts in the budget of all bodies


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
_SNAPSHOT: Final = RouteCost(Work.SNAPSHOT, 0.01)

# The names of the routes' functions, which are also their labels in the metrics.
_OF: Final = (
    (_TURN, "chat_completions completions messages"),
    (_RECALL, "create_response count_input_tokens"),
    (_QUESTION, "count_tokens embeddings tokenize detokenize"),
    (
        _READ,
        "list_completions show_completion list_messages show_response list_input_items "
        "show_conversation list_items show_item",
    ),
    (
        _WRITE,
        "update_completion delete_completion delete_response cancel_response compact_conversation "
        "create_conversation update_conversation delete_conversation add_items delete_item",
    ),
    (_TABLE, "list_models show_model list_sessions show_session"),
    (_VERB, "demote prefetch pin unpin forget"),
    (_SNAPSHOT, "show_snapshot"),
    (
        _OPEN,
        "livez readyz health show_version metrics openapi docs root client_settings dashboard "
        "dashboard_file",
    ),
    (_ADMIN, "list_keys show_findings show_log show_shelf show_cached"),
    (
        _ADMIN_CHANGE,
        "make_key revoke_key measure load_model unload_model download_model stop_download "
        "delete_model",
    ),
)
ROUTE_COSTS: Final[dict[str, RouteCost]] = {name: x for x, names in _OF for name in names.split()}


def cost_of(scope: Scope) -> RouteCost:
    """Return the cost of the route that a request was sent to."""
    return ROUTE_COSTS[scope["endpoint"].__name__]
