"""Holds tenants to bytes of the tiers, over all engines and all gateways of one Redis.

Each engine enforces what this gateway says; ``byte_shares`` divides a tenant's limit among the
engines. A share that is to be smaller is first enforced by the engine and then given back, and one
that grows is first taken and then allowed: so the bytes of all engines together stay within the
limit, whatever dies in between. Without a Redis, and while it does not answer, the engines of this
gateway alone share the limits, as with all limits of a key (``shared_limits``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from engines.base import EngineError, LimitsTenants, TenantLimits, TierName, Welcome
from gateway.keys import Limits, Tenants
from gateway.limits.byte_shares import LocalShares, Share, ask_share, lead, read_share
from gateway.limits.limit_scripts import Command, Reply
from gateway.limits.shared_limits import MAX_BATCH, SharedLimits
from kvstore.session import TIER_NAMES
from kvstore.tenant_bytes import TenantUse

TICK_S: Final = 0.5
AGAIN_S: Final = 0.05  # after a round in which a share has grown, which its engine is to learn
LEASE_S: Final = 15.0
WANT_S: Final = 60.0  # for so long an engine asks again for bytes that it missed
IDLE_S: Final = 300.0  # a tenant without requests for so long keeps no bytes ready
FULL: Final = 0.9  # of its limit

log = logging.getLogger("thermocline.limits")


class Place(NamedTuple):
    """A tenant's bytes of one tier."""

    tier: TierName
    tenant: str


class Used(NamedTuple):
    """A tenant's bytes of one tier on the engines of this gateway, and its limit over all."""

    held: int
    limit: int


@dataclass
class Part:
    """One engine's part of a tenant's bytes of one tier."""

    share: Share
    held: int = 0
    wanted: int = 0
    missed: int = 0
    missed_at: float = float("-inf")

    def target(self, most: int) -> int:
        """Return what the engine is to hold to."""
        return min(self.share.kept(most), self.wanted)


@dataclass
class Member:
    """An engine that holds tenants to limits, in one of its lives."""

    engine: LimitsTenants
    life: Welcome
    parts: dict[Place, Part] = field(default_factory=dict)
    known: set[TierName] = field(default_factory=set)  # tiers whose contents it has reported
    leads_until: float = float("-inf")  # of an engine that other gateways use, too
    is_limited: bool = False  # some limits were set in this life


class TierBytes:
    """Sets and divides the limits. Runs on the event loop."""

    def __init__(
        self,
        engines: Callable[[], Mapping[str, LimitsTenants]],
        tenants: Tenants,
        usual: Callable[[], Limits],
        shared: SharedLimits | None = None,
        on_full: Callable[[TierName, int], None] = lambda tier, number: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            engines: returns those that are there now, by name; see ``Models.engines``.
            usual: returns the limits of tenants whose keys say nothing else.
            on_full: called in each round with the number of tenants that hold nearly all that they
                may, for each tier with limits.
        """
        self._engines = engines
        self._tenants = tenants
        self._usual = usual
        self._shared = shared
        self._on_full = on_full
        self._clock = clock
        self._gateway = secrets.token_hex(8)
        self._members: dict[str, Member] = {}
        self._local: dict[Place, LocalShares] = {}
        self._seen: dict[str, float] = {}  # when a tenant's last request came
        self._wake = asyncio.Event()
        self._limits: dict[Place, int] = {}
        self._has_grown = False

    def seen(self, tenant: str) -> None:
        """Note a request of a tenant: bytes are kept ready for it on each engine."""
        now = self._clock()
        if now - self._seen.get(tenant, float("-inf")) > IDLE_S:
            self._wake.set()
        self._seen[tenant] = now

    def used(self, tenant: str) -> dict[TierName, Used]:
        """Return what a tenant holds of each tier where it has a limit."""
        return {
            place.tier: Used(self._held(place), most)
            for place, most in self._limits.items()
            if place.tenant == tenant
        }

    def _held(self, place: Place) -> int:
        return sum(x.parts[place].held for x in self._members.values() if place in x.parts)

    async def run(self) -> None:
        """Look at all engines, again and again, until cancelled."""
        while True:
            await self.round()
            try:
                async with asyncio.timeout(AGAIN_S if self._has_grown else TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def round(self) -> None:
        """Have all engines hold to their shares, and divide the limits anew."""
        usual = self._usual()
        named = {tier: self._tenants.bytes_of(tier, usual) for tier in TIER_NAMES}
        self._limits = {Place(x, y): most for x in TIER_NAMES for y, most in named[x].items()}
        since = self._clock() - IDLE_S
        self._seen = {x: at for x, at in self._seen.items() if at > since}
        self._look_at_engines()
        self._has_grown = False
        is_set = bool(self._limits) or any(usual.bytes_of(x) for x in TIER_NAMES)
        wanted = {name: x for name, x in self._members.items() if (is_set or x.is_limited)}
        led = await self._led(wanted)
        await asyncio.gather(*(self._settle(name, wanted[name], usual) for name in led))
        full = [x.tier for x, most in self._limits.items() if self._held(x) >= FULL * most]
        for tier in {x.tier for x in self._limits}:
            self._on_full(tier, full.count(tier))

    def _look_at_engines(self) -> None:
        members: dict[str, Member] = {}
        for name, engine in self._engines().items():
            if (life := engine.welcome) is None or not life.limits_tenants:
                continue
            known = self._members.get(name)
            is_same = known is not None and known.life is life
            members[name] = known if known is not None and is_same else Member(engine, life)
        self._members = members
        for shares in self._local.values():
            shares.keep(set(members))

    async def _led(self, members: Mapping[str, Member]) -> list[str]:
        """Return the names of those engines whose limits this gateway sets."""
        now = self._clock()
        if self._shared is None or not self._shared.is_shared:
            return list(members)
        asked = [x for x, m in members.items() if m.engine.shared_address and m.leads_until < now]
        lease_ms = round(2 * LEASE_S * 1000)
        replies = await self._ask(
            [lead(self._name("leads", x), self._gateway, lease_ms) for x in asked]
        )
        for name, reply in zip(asked, replies, strict=False):
            if reply == 1:
                members[name].leads_until = now + LEASE_S
        return [x for x, m in members.items() if not m.engine.shared_address or m.leads_until > now]

    async def _settle(self, name: str, member: Member, usual: Limits) -> None:
        """Have one engine hold to its shares, and ask for the bytes that it needs."""
        targets = {
            place: part.target(most) if (part := member.parts.get(place)) else 0
            for place, most in self._limits.items()
        }
        try:
            before = set(member.known)
            await self._tell(member, targets, usual)
        except EngineError as error:
            log.debug("an engine does not hold tenants to their bytes yet: %s", error)
            return
        in_use = {x: max(part.held, targets[x]) for x, part in member.parts.items()}
        await self._divide(name, member, in_use)
        self._has_grown |= member.known != before or any(
            part.target(self._limits[x]) > targets[x] for x, part in member.parts.items()
        )

    async def _tell(self, member: Member, targets: Mapping[Place, int], usual: Limits) -> None:
        tiers: dict[TierName, TenantLimits] = {}
        for tier in TIER_NAMES:
            named = {x.tenant: nbytes for x, nbytes in targets.items() if x.tier == tier}
            most = usual.bytes_of(tier)
            if named or most:
                others = most // len(self._members) if most else None
                # Nothing is lost for that its contents are not known yet.
                tiers[tier] = TenantLimits(named, others, spares=tier not in member.known)
        uses = (await member.engine.limit_tenants(tiers)).tiers
        member.is_limited = bool(tiers)
        member.known = set(uses)
        now = self._clock()
        member.parts = {x: part for x, part in member.parts.items() if x in targets}
        for place in targets:
            if place.tier not in uses:
                member.parts.pop(place, None)  # it is not known what the engine holds
                continue
            use = uses[place.tier].get(place.tenant, TenantUse(0))
            part = member.parts.get(place)
            if part is None:
                if not use.held and not use.missed and place.tenant not in self._seen:
                    continue
                part = member.parts[place] = Part(Share(0))
            part.held = use.held
            if use.missed:
                part.missed, part.missed_at = use.missed, now
            elif now - part.missed_at > WANT_S:
                part.missed = 0

    async def _divide(self, name: str, member: Member, in_use: Mapping[Place, int]) -> None:
        """Ask for the shares that an engine is to have from now on."""
        for place, part in member.parts.items():
            part.wanted = self._wanted(place, part)
        questions = [(x, in_use[x], part.wanted) for x, part in member.parts.items()]
        shares = await self._shares(name, questions)
        for (place, _, wanted), share in zip(questions, shares, strict=True):
            member.parts[place].share = share
            if not wanted and not share.given:
                del member.parts[place]

    def _wanted(self, place: Place, part: Part) -> int:
        most = self._limits[place]
        if not (part.held or part.missed or place.tenant in self._seen):
            return 0
        num = max(len(self._members), part.share.num_others + 1)
        spare = most if num == 1 else most // (2 * num)
        return min(most, part.held + part.missed + spare)

    async def _shares(self, name: str, questions: Sequence[tuple[Place, int, int]]) -> list[Share]:
        if self._shared is not None and self._shared.is_shared:
            is_own = not self._members[name].engine.shared_address
            engine = self._name("engine", f"{self._gateway}/{name}" if is_own else name)
            lease_ms = round(LEASE_S * 1000)
            commands = [
                ask_share(
                    self._name(place.tenant, place.tier),
                    self._limits[place],
                    engine,
                    used,
                    wanted,
                    lease_ms,
                )
                for place, used, wanted in questions
            ]
            replies = await self._ask(commands)
            if len(replies) == len(questions):
                try:
                    shares = [read_share(x) for x in replies]
                    self._local.clear()
                    return shares
                except ValueError as error:
                    log.warning("the shares of tenants' bytes cannot be read: %s", error)
        return [
            self._local.setdefault(place, LocalShares()).ask(
                self._limits[place], name, used, wanted
            )
            for place, used, wanted in questions
        ]

    async def _ask(self, commands: Sequence[Command]) -> list[Reply]:
        """Ask the Redis; no replies if it does not answer."""
        assert self._shared is not None
        try:
            replies: list[Reply] = []
            for i in range(0, len(commands), MAX_BATCH):
                replies += await asyncio.to_thread(self._shared.ask, commands[i : i + MAX_BATCH])
            return replies
        except ConnectionError:
            return []

    def _name(self, *words: str) -> str:
        assert self._shared is not None
        return self._shared.name_of("bytes\0" + "\0".join(words))
