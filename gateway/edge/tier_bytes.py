"""Limits the bytes that a tenant may hold in a tier, on each engine.

The engines enforce the limits: beyond its limit a tenant's own oldest copies are evicted. Each
engine is sent all limits every ``TICK_S``, so that one that was restarted or unreachable soon has
them; its answer reports the bytes that each tenant holds there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from engines.base import EngineError, LimitsTenants, TenantLimits, TierName, Welcome
from gateway.keys import Limits, Tenants
from kvstore.session import NO_LIMITS, TIER_NAMES

TICK_S: Final = 0.5
FULL: Final = 0.9  # the share of its limit from which a tenant counts as full

log = logging.getLogger("thermocline.limits")


def limits_of(tenants: Tenants, usual: Limits) -> dict[TierName, TenantLimits]:
    """Return the present limits, for each tier that has any.

    A tenant without a key, such as one whose key was revoked, has the usual limit.
    """
    found = {}
    for tier in TIER_NAMES:
        others = usual.bytes_of(tier) or None
        each = {name: most or None for name, most in tenants.bytes_of(tier, usual).items()}
        named = {name: most for name, most in each.items() if most != others}
        if named or others:
            found[tier] = TenantLimits(named, others)
    return found


@dataclass
class Member:
    """An engine that can limit tenants, from one start of its process to the next."""

    engine: LimitsTenants
    life: Welcome
    held: Mapping[TierName, Mapping[str, int]] = field(default_factory=dict)
    is_limited: bool = True  # it has limits, perhaps from an earlier gateway


class TierBytes:
    """Sends limits to engines, and keeps their reports. Runs on the event loop."""

    def __init__(
        self,
        engines: Callable[[], Mapping[str, LimitsTenants]],
        tenants: Tenants,
        usual: Callable[[], Limits],
        on_full: Callable[[TierName, int], None] = lambda tier, number: None,
    ) -> None:
        """
        Args:
            engines: returns the present engines, by name; see ``Models.engines``.
            usual: returns the limits of keys whose own lines set none.
            on_full: called in each round for each tier with limits, with the number of tenants that
                hold at least ``FULL`` of their limit on an engine; once with 0 when a tier has no
                limit any more.
        """
        self._engines = engines
        self._tenants = tenants
        self._usual = usual
        self._on_full = on_full
        self._members: dict[str, Member] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}  # by engine
        self._source: tuple[int, Limits] | None = None  # that ``_limits`` were made from
        self._limits: dict[TierName, TenantLimits] = {}
        self._shown: set[TierName] = set()  # tiers with limits in the last round

    def used(self, tenant: str) -> dict[TierName, dict[str, int]]:
        """Return a tenant's bytes and its limit, for each tier in which it has a limit.

        If there are several engines, the bytes are those on the engine where it holds most.
        """
        return {
            tier: {"held": self._held(tier)[tenant], "limit": most}
            for tier, limits in self._limits.items()
            if (most := limits.of(tenant))
        }

    def _held(self, tier: TierName) -> Counter[str]:
        """Return each tenant's bytes in a tier, on the engine where it holds most."""
        found = Counter[str]()
        for member in self._members.values():
            found |= Counter(member.held.get(tier, {}))
        return found

    async def run(self) -> None:
        """Run a round every ``TICK_S``, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self.round(group)
                await asyncio.sleep(TICK_S)

    def round(self, group: asyncio.TaskGroup) -> None:
        """Send the limits to each engine, in tasks of ``group``.

        An engine that has not answered an earlier round yet is skipped, and delays no other.
        """
        source = self._tenants.num_replaced, self._usual()
        if source != self._source:
            self._source, self._limits = source, limits_of(self._tenants, source[1])
        self._look_at_engines()
        self._report_full()
        self._asking = {x: task for x, task in self._asking.items() if not task.done()}
        for name, member in self._members.items():
            if (self._limits or member.is_limited) and name not in self._asking:
                self._asking[name] = group.create_task(self._ask(member, self._limits))

    def _look_at_engines(self) -> None:
        members: dict[str, Member] = {}
        for name, engine in self._engines().items():
            if (life := engine.welcome) is None:
                continue
            known = self._members.get(name)
            members[name] = known if known and known.life is life else Member(engine, life)
        self._members = members

    async def _ask(self, member: Member, limits: Mapping[TierName, TenantLimits]) -> None:
        try:
            held = (await member.engine.limit_tenants(limits)).tiers
        except EngineError as error:
            log.debug("an engine could not be sent the limits of tenants: %s", error)
            return
        member.is_limited = bool(limits)
        member.held = held

    def _report_full(self) -> None:
        for tier in {*self._limits, *self._shown}:
            limits = self._limits.get(tier, NO_LIMITS)
            held = [(nbytes, limits.of(tenant)) for tenant, nbytes in self._held(tier).items()]
            self._on_full(tier, sum(most is not None and FULL * most <= x for x, most in held))
        self._shown = set(self._limits)
