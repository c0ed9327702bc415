"""Lets a key's requests in, within that key's limits; says so in each answer's head.

What a key uses in a minute is counted by ``rates``, over all gateways that share a Redis. Tokens
are counted when an answer has ended, since they are not known before, so a key may go over once and
waits for it afterwards. Requests at once are those of this gateway. A session has no row before its
turn has a slot, so the ids on their way there are counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from starlette.types import Scope

from gateway.edge.rates import AGAIN_S, Most, Rates, Taken
from gateway.edge.route_costs import RouteCost
from gateway.errors import Failure, RequestRefused
from gateway.keys import Limits, Tenant

# Keys of the scope's state:
KEY_SHARE = "key_share"  # the request's share of its key's limits
TAKEN = "taken"  # the answer of ``Rates`` to the request
Headers = tuple[tuple[str, str], ...]


class KeyLimits:
    """The limits of all keys of one app. Runs on the event loop."""

    def __init__(self, usual: Limits, rates: Rates | None = None) -> None:
        """``usual``: of keys whose lines say nothing else."""
        self.usual = usual  # may be replaced at any time
        self.rates = rates or Rates()
        self._running: Counter[str] = Counter()  # requests that compute, by key
        self._coming: dict[str, Counter[str]] = {}  # by tenant: the sessions of running requests

    def of(self, tenant: Tenant) -> Limits:
        """Return what the caller's key may take."""
        return tenant.limits or self.usual

    def has_rates(self, tenant: Tenant) -> bool:
        """Say whether the key's requests are to be counted by ``count``."""
        return bool(_most(self.of(tenant)))

    async def count(self, tenant: Tenant, scope: Scope, cost: RouteCost) -> None:
        """Count a request in the key's minute, before ``enter`` lets it in or refuses it."""
        most = _most(self.of(tenant))
        if most and cost.requests and self._has_place(tenant, cost):
            scope["state"][TAKEN] = await self.rates.take(_name(tenant), most, cost)

    def enter(self, tenant: Tenant, scope: Scope, cost: RouteCost) -> None:
        """Let a request in; ``leave`` of its share lets the next one in.

        A cost that counts nothing leaves no share.

        Raises:
            RequestRefused: 429, the key has used up what it may.
        """
        if not cost.requests:
            return
        taken: Taken = scope["state"].pop(TAKEN, Taken())
        if not self._has_place(tenant, cost):
            running = self._running[_name(tenant)]
            raise _refusal(f"{running} requests of this key are running already", AGAIN_S, taken)
        if what := taken.refused:
            most = _most(self.of(tenant))[what]
            raise _refusal(f"this key may use {most} {what} a minute", taken.wait_s, taken)
        scope["state"][KEY_SHARE] = KeyShare(self, tenant, taken, int(cost.computes))

    def _has_place(self, tenant: Tenant, cost: RouteCost) -> bool:
        at_once = self.of(tenant).concurrent_requests
        return not (cost.computes and at_once) or self._running[_name(tenant)] < at_once

    def run(self, tenant: Tenant, more: int) -> None:
        """Add ``more``, which may be negative, to the key's running requests."""
        name = _name(tenant)
        self._running[name] += more
        if not self._running[name]:
            del self._running[name]

    def use_tokens(self, tenant: Tenant, number: int) -> None:
        """Count the tokens of a prompt and its answer."""
        self.rates.use_tokens(_name(tenant), _most(self.of(tenant)), number)

    def coming(self, tenant: Tenant) -> Collection[str]:
        """Return the sessions that requests of the tenant are about now, with a row or without."""
        return self._coming.get(tenant.name, ())

    def comes(self, tenant: Tenant, session_id: str, scope: Scope) -> None:
        """Note which session a request is about, until it ends; it has been let in by ``enter``."""
        self._coming.setdefault(tenant.name, Counter())[session_id] += 1
        share = key_share_of(scope)
        assert share is not None
        share.on_leaving(partial(self._gone, tenant.name, session_id))

    def _gone(self, tenant: str, session_id: str) -> None:
        ids = self._coming[tenant]
        ids[session_id] -= 1
        if not ids[session_id]:
            del ids[session_id]
        if not ids:
            del self._coming[tenant]


class KeyShare:
    """The share that one request has of its key: a place among those that run, if it computes."""

    def __init__(self, limits: KeyLimits, tenant: Tenant, taken: Taken, num_places: int) -> None:
        self._limits = limits
        self._tenant = tenant
        self._windows = dict(taken.windows)
        self._num_places = num_places
        self._inside = True
        self._on_leaving: list[Callable[[], None]] = []
        limits.run(tenant, num_places)

    def on_leaving(self, then: Callable[[], None]) -> None:
        """Have ``then`` called when the request has ended; at once if it has."""
        if self._inside:
            self._on_leaving.append(then)
        else:
            then()

    def headers(self) -> Headers:
        """Return ``x-ratelimit-*``, in OpenAI's words, as of when the request was let in."""
        return _headers(Taken(self._windows))

    def used_tokens(self, number: int) -> None:
        """Count the tokens of a prompt and its answer."""
        self._limits.use_tokens(self._tenant, number)
        if (tokens := self._windows.get("tokens")) is not None:
            self._windows["tokens"] = tokens.plus(number)

    def leave(self) -> None:
        """Make room for another request; may be called twice."""
        if self._inside:
            self._inside = False
            self._limits.run(self._tenant, -self._num_places)
            for then in self._on_leaving:
                then()


def key_share_of(scope: Scope) -> KeyShare | None:
    """Return the share of a request; None if it was not let in by a key's limits."""
    found: KeyShare | None = scope["state"].get(KEY_SHARE)
    return found


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
    message = f"Too much at once: {why}. Try again later."
    failure = Failure(429, message, None, "rate_limit_exceeded", wait_s, _headers(taken))
    return RequestRefused(failure)
