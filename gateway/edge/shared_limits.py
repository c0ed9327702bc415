"""One key's limits over all gateways that share a Redis.

Each gateway takes slices of a key's limits from the server, ahead, and lets requests in by the
slices at hand: so the sum over all gateways is the key's limit, and the server is asked by one task
beside. A request waits for it only where nothing is at hand, and never longer than ``WAIT_S``. One
whose share has not been answered by then is let in by this gateway's own count, and owed to the
server: a Redis that is far away, or busy for a moment, refuses nothing that is within the limits.

Where the server does not answer, each gateway counts for itself, as it does without a Redis
(``KeyLimits``), until it answers again. That is said in the log, once, and in a metric. Places are
leased: those of a gateway that was killed are free after ``stock.LEASE_S``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from gateway.edge.stock import LEASE_S, Command, LocalQuota, Reply, claim, drop, keep, read_number
from gateway.keys import Limits, Tenant

WAIT_S: Final = 0.1
TICK_S: Final = 0.5
MAX_BATCH: Final = 500  # questions that travel together
SESSIONS_LEASE_S: Final = 180.0
SESSIONS_KEEP_S: Final = 60.0
SAY_EVERY_S: Final = 60.0  # that they are not shared
MAX_NAMES: Final = 500  # of sessions in one command

# Sends commands, returns their replies in order; raises ``ConnectionError``. Called on a thread.
Ask: TypeAlias = Callable[[Sequence[Command]], Sequence[Reply]]
Question: TypeAlias = tuple[Command, Callable[[Reply], None]]

log = logging.getLogger("thermocline.limits")


class _Claimed:
    """The sessions of one tenant, as the server knows of this gateway's."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.kept_at = float("-inf")


class Reservation:
    """Holds what a request has waited for, until it takes it; others leave so much at hand.

    ``is_answered`` is False where the server has not said in time whether there is so much.
    """

    def __init__(self, stock: LocalQuota, *, is_answered: bool) -> None:
        self._stock = stock
        self.is_answered = is_answered
        self._is_kept = True
        stock.reserved += 1

    def release(self) -> None:
        """Let it be taken; may be called twice."""
        if self._is_kept:
            self._is_kept = False
            self._stock.reserved -= 1


class SharedLimits:
    """The shares of this gateway. Runs on the event loop, but for ``ask``.

    Args:
        ask: reaches the Redis.
            name_of: makes a name for a key or a tenant that reveals nothing of it to others.
        on_change: called with True when limits begin to be shared, with False when they end to.
    """

    def __init__(
        self,
        ask: Ask,
        name_of: Callable[[str], str],
        on_change: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.ask = ask
        self.name_of = name_of
        self.on_change = on_change
        # Lists a tenant's sessions here; set by the app.
        self.sessions_of: Callable[[str], Collection[str]] = lambda tenant: ()
        self._gateway = secrets.token_hex(8)
        self.is_shared = False
        self._is_reported = False
        self._said_at = float("-inf")
        self._stocks: dict[str, LocalQuota] = {}
        self._claimed: dict[str, _Claimed] = {}
        self._claims: list[Question] = []
        self._wake = asyncio.Event()
        self._ended: asyncio.Future[None] | None = None  # of the round that comes next

    def stock(self, tenant: Tenant, limits: Limits) -> LocalQuota | None:
        """Return what the caller's key has at hand; None if it has no limit that is shared."""
        if not any(limits[:3]):
            return None
        stock = self._stocks.get(tenant.key_id)
        if stock is None:
            name = self.name_of(tenant.key_id or tenant.name)
            stock = self._stocks[tenant.key_id] = LocalQuota(name, limits, time.monotonic)
        elif stock.limits != limits:
            stock.limit_to(limits)
        stock.used_at = time.monotonic()
        return stock

    async def ready(self, tenant: Tenant, limits: Limits) -> Reservation | None:
        """Have at hand what one request of the key needs, if there is so much; waits a moment."""
        stock = self.stock(tenant, limits) if self.is_shared else None
        if stock is None:
            return None
        is_answered = True
        if not stock.is_enough and stock.may_wait:
            stock.num_waiting += 1
            try:
                is_answered = await self._rounds(lambda: stock.is_enough)
            finally:
                stock.num_waiting -= 1
        return Reservation(stock, is_answered=is_answered or stock.is_known_short)

    async def claim_session(self, tenant: Tenant, most: int, session: str) -> bool:
        """Say whether a tenant may open a session, counting those at all gateways.

        True also where that cannot be known in time.
        """
        if not most or not self.is_shared:
            return True
        answer: list[int] = []
        mine = self._claimed.setdefault(tenant.name, _Claimed())
        if mine.kept_at == float("-inf"):
            self._claims += self._keeping(tenant.name, mine)
        name = self._sessions_name(tenant.name)
        command = claim(name, most, _short(session), round(SESSIONS_LEASE_S * 1000))
        self._claims.append((command, lambda reply: answer.append(read_number(reply))))
        await self._rounds(lambda: bool(answer))
        return not answer or answer[0] == 1

    async def _rounds(self, enough: Callable[[], bool]) -> bool:
        """Wait for the round that comes next, or two, until it is enough; at most ``WAIT_S``.

        Returns whether that was in time.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                for _ in range(2):  # one may be under way, which does not know of this
                    if enough() or not self.is_shared:
                        break
                    self._wake.set()
                    if self._ended is None:
                        self._ended = asyncio.get_running_loop().create_future()
                    await asyncio.shield(self._ended)
                return True
        return False

    # ---- the task beside

    async def run(self) -> None:
        """Ask the server, again and again, until cancelled."""
        try:
            while True:
                await self._round()
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            self._end_round()

    async def _round(self) -> None:
        ended, self._ended = self._ended, None
        questions = self._questions()
        commands: list[Command] = [command for command, _ in questions] or [("PING",)]
        try:
            replies = await asyncio.to_thread(self.ask, commands)
            if questions:
                for (_, answered), reply in zip(questions, replies, strict=True):
                    answered(reply)
            self._change(True)
        except (ConnectionError, ValueError) as error:
            self._change(False, str(error))
        finally:
            if ended is not None and not ended.done():
                ended.set_result(None)

    def _end_round(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _questions(self) -> list[Question]:
        now = time.monotonic()
        for key, stock in list(self._stocks.items()):
            if stock.is_idle and now - stock.used_at > 2 * LEASE_S:
                del self._stocks[key]
        questions = [x for y in self._stocks.values() for x in y.questions(self._gateway, now)]
        for tenant, mine in self._claimed.items():
            questions += self._gone(tenant, mine)
            if now - mine.kept_at > SESSIONS_KEEP_S:
                questions += self._keeping(tenant, mine)
        claims, self._claims = self._claims[:MAX_BATCH], self._claims[MAX_BATCH:]
        return claims + questions[:MAX_BATCH]

    def _gone(self, tenant: str, mine: _Claimed) -> list[Question]:
        """Give back the places of sessions that were here and are not any more."""
        here = {_short(x) for x in self.sessions_of(tenant)}
        gone, mine.here = sorted(mine.here - here), here
        return [(drop(self._sessions_name(tenant), gone[:MAX_NAMES]), _pass)] if gone else []

    def _keeping(self, tenant: str, mine: _Claimed) -> list[Question]:
        mine.kept_at = time.monotonic()
        names = [_short(x) for x in self.sessions_of(tenant)]
        lease_ms = round(SESSIONS_LEASE_S * 1000)
        name = self._sessions_name(tenant)
        return [
            (keep(name, names[i : i + MAX_NAMES], lease_ms), _pass)
            for i in range(0, len(names), MAX_NAMES)
        ]

    def _sessions_name(self, tenant: str) -> str:
        return f"{self.name_of(tenant)}:sessions"

    def _change(self, is_shared: bool, why: str = "") -> None:
        if is_shared == self.is_shared and self._is_reported:
            return
        self.is_shared, self._is_reported = is_shared, True
        if not is_shared:
            for stock in self._stocks.values():
                stock.reset()
            self._claims.clear()
            for mine in self._claimed.values():
                mine.kept_at = float("-inf")
        self.on_change(is_shared)
        now = time.monotonic()
        if now - self._said_at < SAY_EVERY_S and not is_shared:
            return
        if is_shared:
            log.info("keys' limits hold over all gateways of this Redis together")
        else:
            self._said_at = now
            log.warning("keys' limits hold at this gateway alone, until Redis answers: %s", why)


def _short(session: str) -> str:
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _pass(reply: Reply) -> None:
    if isinstance(reply, Exception):
        raise ValueError(str(reply))
