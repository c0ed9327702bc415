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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from engines.base import EngineError, LimitsTenants, TenantLimits, TierName, Welcome
from gateway.edge.byte_shares import (
    LocalShares,
    Share,
    ask_held,
    ask_share,
    lead,
    read_bytes,
    read_share,
)
from gateway.edge.shared_limits import MAX_BATCH, SharedLimits
from gateway.edge.stock import Command, Reply
from gateway.keys import Limits, Tenants
from kvstore.session import TIER_NAMES
from kvstore.tenant_bytes import TenantUse

TICK_S: Final = 0.5
LEASE_S: Final = 15.0  # much longer than an engine may take to answer
WANT_S: Final = 60.0  # for so long an engine asks again for bytes that it missed
IDLE_S: Final = 300.0  # a tenant without requests for so long keeps no bytes ready
FULL: Final = 0.9  # of its limit

log = logging.getLogger("thermocline.limits")


class Place(NamedTuple):
    """A tenant's bytes of one tier."""

    tier: TierName
    tenant: str


class Used(NamedTuple):
    """A tenant's bytes of one tier on the engines of all gateways, and its limit over all.

    ``only_here``: on those of this gateway, since Redis does not answer.
    """

    held: int
    limit: int
    only_here: bool = False


class Question(NamedTuple):
    """Asks for a share of a tenant's bytes, with those that an engine uses, wants and holds."""

    place: Place
    most: int
    used: int
    wanted: int
    held: int


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


class Rules:
    """The limits as they are now, over all engines."""

    def __init__(self, tenants: Tenants, usual: Limits) -> None:
        self.source = tenants.num_replaced, usual
        self._named = {x: tenants.bytes_of(x, usual) for x in TIER_NAMES}
        self._usual = {x: usual.bytes_of(x) for x in TIER_NAMES}
        self.tiers = [x for x in TIER_NAMES if self._usual[x] or any(self._named[x].values())]
        # The limits of tenants that have no part at an engine: a tenant in no list of keys,
        # such as one whose key was revoked, has the usual limit.
        self.plain = {
            x: TenantLimits(
                {
                    tenant: 0 if most else None
                    for tenant, most in self._named[x].items()
                    if bool(most) != bool(self._usual[x])
                },
                0 if self._usual[x] else None,
            )
            for x in self.tiers
        }

    def most(self, place: Place) -> int:
        """Return a limit; 0 = any number."""
        return self._named[place.tier].get(place.tenant, self._usual[place.tier])


@dataclass
class Member:
    """An engine that holds tenants to limits, in one of its lives."""

    engine: LimitsTenants
    life: Welcome
    parts: dict[Place, Part] = field(default_factory=dict)
    # Tiers whose contents it has reported, of those tenants that have limits by this.
    counted: dict[TierName, TenantLimits] = field(default_factory=dict)
    leads_until: float = float("-inf")  # of an engine that other gateways use, too
    is_limited: bool = True  # perhaps, by an earlier gateway


class TierBytes:
    """Sets and divides the limits. Runs on the event loop."""

    def __init__(
        self,
        engines: Callable[[], Mapping[str, LimitsTenants]],
        tenants: Tenants,
        usual: Callable[[], Limits],
        shared: SharedLimits | None = None,
        on_full: Callable[[TierName, int], None] = lambda tier, number: None,
        busy: Callable[[], Iterable[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            engines: returns those that are there now, by name; see ``Models.engines``.
            usual: returns the limits of tenants whose keys say nothing else.
            on_full: called in each round with the number of tenants that hold nearly all that they
                may, for each tier with limits, and once with 0 when its last limit has gone.
            busy: returns the tenants with running turns.
        """
        self._engines = engines
        self._tenants = tenants
        self._usual = usual
        self._shared = shared
        self._on_full = on_full
        self._busy = busy
        self._clock = clock
        self._gateway = secrets.token_hex(8)
        self._members: dict[str, Member] = {}
        self._settling: dict[str, asyncio.Task[None]] = {}  # by engine
        self._local: dict[Place, LocalShares] = {}
        self._seen: dict[str, float] = {}  # when a tenant's last request came, or still ran
        self._wake = asyncio.Event()
        self._rules = Rules(tenants, Limits())
        self._shown: list[TierName] = []  # tiers of which ``on_full`` knows

    def seen(self, tenant: str) -> None:
        """Note a request of a tenant: bytes are kept ready for it on each engine."""
        now = self._clock()
        if now - self._seen.get(tenant, float("-inf")) > IDLE_S:
            self._wake.set()
        self._seen[tenant] = now

    async def used(self, tenant: str) -> dict[TierName, Used]:
        """Return what a tenant holds of each tier where it has a limit."""
        limits = {x: self._rules.most(Place(x, tenant)) for x in self._rules.tiers}
        limits = {x: most for x, most in limits.items() if most}
        held = await self._held_by_all(tenant, list(limits))
        if held is not None:
            return {x: Used(held[x], most) for x, most in limits.items()}
        alone = self._shared is not None
        return {x: Used(self._held(Place(x, tenant)), most, alone) for x, most in limits.items()}

    def _held(self, place: Place) -> int:
        return sum(x.parts[place].held for x in self._members.values() if place in x.parts)

    async def _held_by_all(
        self, tenant: str, tiers: Sequence[TierName]
    ) -> dict[TierName, int] | None:
        """Return what a tenant holds at all gateways; None if the Redis does not answer."""
        if self._shared is None or not self._shared.is_shared:
            return None
        replies = await self._ask([ask_held(self._name(tenant, x)) for x in tiers])
        try:
            return {x: read_bytes(reply) for x, reply in zip(tiers, replies, strict=True)}
        except ValueError:
            return None

    async def run(self) -> None:
        """Look at all engines, again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                await self.round(group)
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()

    async def round(self, group: asyncio.TaskGroup) -> None:
        """Have each engine hold to its shares, and divide the limits anew, by tasks of ``group``.

        An engine that has not answered since an earlier round is left out, and delays no other.
        """
        if self._rules.source != (self._tenants.num_replaced, usual := self._usual()):
            self._rules = Rules(self._tenants, usual)
        rules = self._rules
        now = self._clock()
        self._seen |= dict.fromkeys(self._busy(), now)
        self._seen = {x: at for x, at in self._seen.items() if at > now - IDLE_S}
        self._look_at_engines()
        self._report_full()
        self._settling = {x: task for x, task in self._settling.items() if not task.done()}
        asked = {
            name: member
            for name, member in self._members.items()
            if (rules.tiers or member.is_limited) and name not in self._settling
        }
        for name in await self._led(asked):
            self._settling[name] = group.create_task(self._settle(name, asked[name], rules))

    def _report_full(self) -> None:
        held: Counter[Place] = Counter()
        for member in self._members.values():
            for place, part in member.parts.items():
                held[place] += part.held
        limits = {x: most for x in held if (most := self._rules.most(x))}
        full = Counter(x.tier for x, most in limits.items() if held[x] >= FULL * most)
        for tier in {*self._rules.tiers, *self._shown}:
            self._on_full(tier, full[tier])
        self._shown = self._rules.tiers

    def _look_at_engines(self) -> None:
        members: dict[str, Member] = {}
        for name, engine in self._engines().items():
            if (life := engine.welcome) is None or not life.limits_tenants:
                continue
            known = self._members.get(name)
            if known is None or known.life is not life:
                # After a lost connection the engine may still hold to its former limits.
                known = Member(engine, life, dict(known.parts) if known else {})
            members[name] = known
        self._members = members
        for shares in self._local.values():
            shares.keep(members.keys())

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

    async def _settle(self, name: str, member: Member, rules: Rules) -> None:
        """Have one engine hold to its shares, and ask for the bytes that it needs.

        Shares that have grown are sent at once, and so are those that had to wait until the
        engine's contents were counted.
        """
        try:
            if await self._settle_once(name, member, rules):
                await self._settle_once(name, member, rules)
        except EngineError as error:
            log.debug("an engine does not hold tenants to their bytes yet: %s", error)
            in_use = {x: part.share.given for x, part in member.parts.items() if rules.most(x)}
            await self._divide(name, member, in_use, rules)  # it may still use all of them

    async def _settle_once(self, name: str, member: Member, rules: Rules) -> bool:
        """Send limits once; return True if others have to follow."""
        tiers = {
            x: msgspec.structs.replace(plain, counts_only=member.counted.get(x) != plain)
            for x, plain in rules.plain.items()
        }
        sent: dict[Place, int] = {}
        for place, part in member.parts.items():
            if (most := rules.most(place)) and not tiers[place.tier].counts_only:
                sent[place] = part.target(most)
        for tier, limits in tiers.items():
            if not limits.counts_only:
                named = {x.tenant: nbytes for x, nbytes in sent.items() if x.tier == tier}
                tiers[tier] = TenantLimits({**limits.named, **named}, limits.others)
        uses = (await member.engine.limit_tenants(tiers)).tiers
        member.is_limited = bool(tiers)
        member.counted = {x: plain for x, plain in rules.plain.items() if x in uses}
        self._count(member, uses, rules)
        in_use = {x: max(p.held, sent.get(x, p.share.given)) for x, p in member.parts.items()}
        await self._divide(name, member, in_use, rules)
        return any(x.counts_only and tier in uses for tier, x in tiers.items()) or any(
            part.target(rules.most(x)) > sent.get(x, 0) for x, part in member.parts.items()
        )

    def _count(
        self, member: Member, uses: Mapping[TierName, Mapping[str, TenantUse]], rules: Rules
    ) -> None:
        """Take over what an engine holds; of tiers that are not in ``uses`` it is not known."""
        now = self._clock()
        parts = {x: p for x, p in member.parts.items() if x.tier in uses and rules.most(x)}
        places = {Place(x, tenant) for x in rules.plain for tenant in uses.get(x, ())}
        places |= {Place(x, tenant) for x in rules.plain if x in uses for tenant in self._seen}
        for place in places | parts.keys():
            use = uses[place.tier].get(place.tenant, TenantUse(0))
            is_there = use.held or use.missed or place.tenant in self._seen
            if place not in parts and not (is_there and rules.most(place)):
                continue
            part = parts.setdefault(place, Part(Share(0)))
            part.held = use.held
            if use.missed:
                part.missed, part.missed_at = use.missed, now
            elif now - part.missed_at > WANT_S:
                part.missed = 0
        member.parts = parts

    async def _divide(
        self, name: str, member: Member, in_use: Mapping[Place, int], rules: Rules
    ) -> None:
        """Ask for the shares that an engine is to have from now on."""
        questions = []
        for place, used in in_use.items():
            part = member.parts[place]
            part.wanted = self._wanted(place, part, rules.most(place))
            questions.append(Question(place, rules.most(place), used, part.wanted, part.held))
        shares = await self._shares(name, member, questions)
        for question, share in zip(questions, shares, strict=True):
            member.parts[question.place].share = share
            if not question.wanted and not share.given:
                del member.parts[question.place]

    def _wanted(self, place: Place, part: Part, most: int) -> int:
        if not (part.held or part.missed or place.tenant in self._seen):
            return 0
        num = max(len(self._members), part.share.num_others + 1)
        spare = most if num == 1 else most // (2 * num)
        return min(most, part.held + part.missed + spare)

    async def _shares(
        self, name: str, member: Member, questions: Sequence[Question]
    ) -> list[Share]:
        if self._shared is not None and self._shared.is_shared:
            is_own = not member.engine.shared_address
            engine = self._name("engine", f"{self._gateway}/{name}" if is_own else name)
            lease_ms = round(LEASE_S * 1000)
            commands = [
                ask_share(self._name(x.tenant, x.tier), most, engine, used, wanted, lease_ms, held)
                for x, most, used, wanted, held in questions
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
            self._local.setdefault(place, LocalShares()).ask(most, name, used, wanted)
            for place, most, used, wanted, _ in questions
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
