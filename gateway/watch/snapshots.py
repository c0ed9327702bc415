"""Makes snapshots of one model for those who look, at most one a second for each tenant.

All readers of a tenant get the same figures, and a tag by which they see that nothing has changed;
who asks for fewer rows gets the first of them.
Between two snapshots at least ``REST`` times as long passes as the last one took, so that looking
at very many sessions takes a small part of the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from gateway.watch.figures import Sums
from gateway.watch.rows import Rows
from gateway.watch.shape import SessionStatus, Snapshot
from scheduler.session import AWAY

EVERY_S = 1.0
REST = 20.0
LINGER_S = 60.0  # that a snapshot is kept without a reader
MAX_ROWS = 2000
SIZES = (500, MAX_ROWS)  # rows of the snapshots that are kept
ROWS_AT_ONCE = 250  # then others get their turn
_encode = msgspec.json.Encoder().encode


class Made(NamedTuple):
    """A snapshot, and how it is sent."""

    shown: Snapshot
    body: bytes
    tag: str  # another one for other bytes
    until: float  # by the clock: it is made anew from then on
    asked: float


class Snapshots:
    """Makes and keeps the snapshots of one model. Belongs to the event loop."""

    def __init__(
        self,
        rows: Rows,
        look: Callable[[str | None, Sums], Awaitable[Snapshot]],
        clock: Callable[[], float],
    ) -> None:
        """``look`` makes what is shown besides sessions, for a tenant or, None, for admins."""
        self._rows = rows
        self._look = look
        self._clock = clock
        self._made: dict[tuple[str | None, int], Made] = {}
        self._making: defaultdict[tuple[str | None, int], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, tenant: str | None, most: int) -> Made:
        """Return a snapshot that is at most about a second old.

        Args:
            tenant: whose sessions; None = everybody's, for admins.
            most: sessions that are listed, those used last.
        """
        key = (tenant, next((x for x in SIZES if x >= most), MAX_ROWS))
        async with self._making[key]:
            made, now = self._made.get(key), self._clock()
            if made is None or now >= made.until:
                shown = await self._make(*key)
                body = _encode(shown)
                tag = hashlib.blake2b(body, digest_size=12).hexdigest()
                until = now + max(EVERY_S, REST * (self._clock() - now))
                made = Made(shown, body, tag, until, now)
            self._made[key] = made._replace(asked=now)
        self._drop_old(now)
        if most >= len(made.shown.sessions):
            return made
        fewer = msgspec.structs.replace(made.shown, sessions=made.shown.sessions[:most])
        return made._replace(body=_encode(fewer), tag=f"{made.tag}.{most}")

    def _drop_old(self, now: float) -> None:
        for key in [x for x, made in self._made.items() if now - made.asked > LINGER_S]:
            if not self._making[key].locked():
                del self._made[key], self._making[key]

    async def _make(self, tenant: str | None, most: int) -> Snapshot:
        sessions, sums = self._rows.sessions(tenant), Sums()
        for at, session in enumerate(sessions, 1):
            in_bf16 = self._rows.bf16_bytes(session.cold_tokens) if session.cold_bytes else 0
            is_away = self._rows.state(session) == AWAY
            sums.add(session, self._rows.hot_bytes(session) or 0, in_bf16 or 0, is_away)
            if at % (8 * ROWS_AT_ONCE) == 0:
                await asyncio.sleep(0)
        latest = heapq.nlargest(most, sessions, key=lambda x: x.last_used)
        shown: list[SessionStatus] = []
        for at, session in enumerate(latest, 1):
            shown.append(self._rows.shown(session, admin=tenant is None))
            if at % ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        head = await self._look(tenant, sums)
        return msgspec.structs.replace(head, sessions=shown)
