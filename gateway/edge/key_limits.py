"""Lets a key's requests in, within that key's limits; says so in each answer's head.

The counts are of this process. Where several gateways share a Redis, a key's use also counts
against their common limits (``shared_limits``). Tokens are counted when an answer has ended, since
they are not known before, so a key may go over once and waits for it afterwards. A session has no
row before its turn has a slot, so the ids on their way there are counted here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial

from starlette.types import Scope

from gateway.config import GatewayConfig
from gateway.edge.accounts import Account
from gateway.edge.shared_limits import SharedLimits
from gateway.edge.stock import LocalQuota
from gateway.errors import Failure, RequestRefused
from gateway.keys import Limits, Tenant

MINUTE_S = 60.0
KEY_SHARE = "key_share"  # where a request's share is in the scope's state
RESERVED = "reserved"  # and the part of the limits that it has waited for
AGAIN_S = 1.0  # after a refusal for too many at once
Headers = tuple[tuple[str, str], ...]


class Bucket:
    """Holds what may be used in a minute, all at once or spread; ``clock`` is in seconds."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def remaining(self) -> int:
        """The number that may be used now; 0 while more was used than there was."""
        self._fill()
        return max(0, int(self._level))

    @property
    def reset_s(self) -> float:
        """Seconds until the bucket is full again."""
        self._fill()
        return self._seconds(self.per_minute - self._level)

    def wait_s(self, number: float = 1.0) -> float:
        """Return the seconds until ``number`` may be used; 0 if it may be now."""
        self._fill()
        return self._seconds(max(0.0, min(number, float(self.per_minute)) - self._level))

    def use(self, number: float) -> None:
        """Take ``number`` out; more than there is leaves a debt of a minute's worth at most."""
        self._fill()
        self._level = max(self._level - number, -float(self.per_minute))

    def _fill(self) -> None:
        now = self._clock()
        filled = self._level + (now - self._at) * self.per_minute / MINUTE_S
        self._level, self._at = min(float(self.per_minute), filled), now

    def _seconds(self, number: float) -> float:
        return number * MINUTE_S / self.per_minute


def usual_limits(config: GatewayConfig) -> Limits:
    """Return what keys may take whose lines say nothing else."""
    return Limits(
        config.requests_per_minute,
        config.tokens_per_minute,
        config.concurrent_requests,
        config.sessions_per_tenant,
        config.tenant_ram_bytes,
        config.tenant_disk_bytes,
    )


class KeyLimits:
    """The counts of all keys of one app. Runs on the event loop."""

    def __init__(
        self,
        usual: Limits,
        clock: Callable[[], float] = time.monotonic,
        shared: SharedLimits | None = None,
    ) -> None:
        """``usual``: see ``usual_limits``; ``shared``: where the limits are of all gateways."""
        self.shared = shared
        self.usual = usual  # may be replaced at any time
        self._clock = clock
        self._counts: dict[str, _Counts] = {}
        self._coming: dict[str, Counter[str]] = {}  # by tenant: the sessions of running requests

    def of(self, tenant: Tenant) -> Limits:
        """Return what the caller's key may take."""
        return tenant.limits or self.usual

    async def prepare(self, tenant: Tenant, scope: Scope) -> None:
        """Have a part of the limits at hand for a request of the tenant; see ``give_back``."""
        if self.shared is not None:
            scope["state"][RESERVED] = await self.shared.ready(tenant, self.of(tenant))

    def enter(self, tenant: Tenant, scope: Scope, account: Account) -> None:
        """Charge a request to its key; ``leave`` of its share lets the next one in.

        An account that counts nothing leaves no share.

        Raises:
            Refused: 429, the key has used up what it may.
        """
        if not account.requests:
            return
        limits = self.of(tenant)
        counts = self._counts.get(tenant.key_id)
        if counts is None:
            counts = self._counts[tenant.key_id] = _Counts(limits, self._clock)
        elif counts.limits != limits:  # its line was changed; its shares hold on to the counts
            counts.limit_to(limits)
        counts.share_by(self.shared.stock(tenant, limits) if self.shared else None)
        waited = scope["state"].get(RESERVED)
        give_back(scope)
        counts.admit(
            account,
            is_shared=self.shared is not None and self.shared.is_shared,
            is_answered=waited is None or waited.is_answered,
        )
        scope["state"][KEY_SHARE] = KeyShare(counts, int(account.computes))

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


class _Counts:
    """The counts of one key's recent requests and tokens."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.running = 0
        self._clock = clock
        self._stock: LocalQuota | None = None  # this gateway's part of the common limits
        self._is_shared = False  # when a request was let in last
        self.limit_to(limits)

    def limit_to(self, limits: Limits) -> None:
        """Count by these limits from now on; what runs still counts."""
        self.limits = limits
        self._buckets = {
            what: Bucket(per_minute, self._clock)
            for what, per_minute in (
                ("requests", limits.requests_per_minute),
                ("tokens", limits.tokens_per_minute),
            )
            if per_minute
        }

    def share_by(self, stock: LocalQuota | None) -> None:
        """Count there, too."""
        self._stock = stock
        if stock is not None:
            stock.running = self.running

    def admit(self, account: Account, *, is_shared: bool = False, is_answered: bool = True) -> None:
        """Let a request in, and count it.

        Args:
            is_shared: it counts against the common limits.
            is_answered: False if the server has not said whether they have room for it: then the
                counts here decide, and it is owed there.

        Raises:
            Refused: there is no room.
        """
        self._is_shared = is_shared and self._stock is not None
        at_once = self.limits.concurrent_requests
        if account.computes and at_once and self.running >= at_once:
            raise self._refusal(f"{self.running} requests of this key are running already", AGAIN_S)
        needed = {"requests": account.requests, "tokens": float(account.computes)}
        for what, bucket in self._buckets.items():
            if wait_s := bucket.wait_s(needed[what]) if needed[what] else 0.0:
                raise self._refusal(f"this key may use {bucket.per_minute} {what} a minute", wait_s)
        if is_answered:
            self._check_shared(account, needed)
        self.use("requests", account.requests)
        self.run(int(account.computes))

    def _check_shared(self, account: Account, needed: Mapping[str, float]) -> None:
        stock = self._stock
        if stock is None or not self._is_shared:
            return
        if account.computes and not stock.has_place():
            raise self._refusal("requests of this key run at other gateways already", AGAIN_S)
        for what, part in stock.slices.items():
            if needed[what] and not part.holds(needed[what]):
                why = f"this key may use {part.most} {what} a minute at all gateways"
                raise self._refusal(why, part.wait_s(needed[what]))

    def run(self, more: int) -> None:
        """Count so many more that run; fewer, if it is less than nothing."""
        self.running += more
        if self._stock is not None:
            self._stock.running = self.running

    def use(self, what: str, number: float) -> None:
        if what in self._buckets:
            self._buckets[what].use(number)
        if self._stock is not None and self._is_shared and what in self._stock.slices:
            self._stock.slices[what].use(number)

    def _remaining(self, what: str) -> int:
        here = self._buckets[what].remaining
        if self._stock is None or not self._is_shared:
            return here
        return min(here, self._stock.slices[what].remaining)

    def headers(self) -> Headers:
        return tuple(
            (f"x-ratelimit-{name}-{what}", value)
            for what, bucket in self._buckets.items()
            for name, value in (
                ("limit", str(bucket.per_minute)),
                ("remaining", str(self._remaining(what))),
                ("reset", f"{bucket.reset_s:.3f}s"),
            )
        )

    def _refusal(self, why: str, wait_s: float) -> RequestRefused:
        message = f"Too much at once: {why}. Try again later."
        return RequestRefused(
            Failure(429, message, None, "rate_limit_exceeded", wait_s, self.headers())
        )


class KeyShare:
    """The share that one request has of its key: a place among those that run, if it computes."""

    def __init__(self, counts: _Counts, num_places: int = 1) -> None:
        self._counts = counts
        self._num_places = num_places
        self._inside = True
        self._on_leaving: list[Callable[[], None]] = []

    def on_leaving(self, then: Callable[[], None]) -> None:
        """Have ``then`` called when the request has ended; at once if it has."""
        if self._inside:
            self._on_leaving.append(then)
        else:
            then()

    def headers(self) -> Headers:
        """Return ``x-ratelimit-*``, in OpenAI's words."""
        return self._counts.headers()

    def used_tokens(self, number: int) -> None:
        """Count the tokens of a prompt and its answer."""
        self._counts.use("tokens", number)

    def leave(self) -> None:
        """Make room for another request; may be called twice."""
        if self._inside:
            self._inside = False
            self._counts.run(-self._num_places)
            for then in self._on_leaving:
                then()


def give_back(scope: Scope) -> None:
    """Let others have what a request has waited for, and has taken or never will."""
    if (reserved := scope["state"].pop(RESERVED, None)) is not None:
        reserved.release()


def key_share_of(scope: Scope) -> KeyShare | None:
    """Return the share of a request; None if it was not let in by a key's limits."""
    found: KeyShare | None = scope["state"].get(KEY_SHARE)
    return found
