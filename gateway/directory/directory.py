"""Keeps this server's part of the directory, and takes over the others' entries.

A round writes what has changed here and reads what is new, twice in a second, on a thread of its
own; no request waits for it but those that are about other servers' sessions. While the Redis
server is away all goes on as with one server, and the first round after that brings both together.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from engines.base import SessionRef, SessionReport, TierName
from engines.fleet.homes import FleetHomes, Move, SaidMoves
from gateway.directory.orders import Orders, Result, TooManyOrders, Verbs
from gateway.directory.own_rows import Changes, OwnKey, OwnRows, Removals
from gateway.keys import Tenants
from gateway.models.loading import Loading
from gateway.models.served_model import ServedModel
from kvstore.directory.boards import LEASE_S, LIFE_BYTES, MAX_RECENT, Board, Order, Peers
from kvstore.directory.entries import Deletions, Names, Row, page_of
from kvstore.directory.exchange import Exchange, Seen, Server
from kvstore.errors import TierUnavailable

log = logging.getLogger("thermocline.directory")

ROUND_S: Final = 0.5
LEAST_PAUSE_S: Final = 0.05  # between rounds that are wanted at once
SIGN_OF_LIFE_S: Final = LEASE_S / 5
JUMP_S: Final = 5.0  # of the Redis server's clock
REWRITE_S: Final = 600.0  # all pages, in case that the server dropped some
ALL_DELETIONS_S: Final = 5.0  # the recent ones are on the board meanwhile
MAX_CHANGES: Final = 2000  # rows of one round
MAX_PAGES: Final = 64  # of one round
SAID_S: Final = 2.0  # a deletion waits so long until others can see it
FIRST_ROUND_S: Final = 3.0  # the first list of an engine waits so long for deletions
LOOK_AT_ONCE: Final = 500


class Elsewhere(NamedTuple):
    """A session at another server, and whether that server lives."""

    row: Row
    life: bytes
    server: str
    lives: bool
    idle_s: float


class Directory:
    """The directory as this server knows it. Runs on the event loop."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        tenants: Tenants,
        server: Server,
        name: str,
        loading: Loading | None = None,
        homes: FleetHomes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            loading: loads models on demand, for verbs of other servers.
            homes: of sessions whose engines other servers use, too.
            name: of this server, the same in all its lives, and no other's.
            clock: in seconds; only differences count.
        """
        self.name = name
        self.life = secrets.token_bytes(LIFE_BYTES)
        self._models = models
        self._tenants = tenants
        self._clock = clock
        self._names = Names(tenants.key_of)
        self._exchange = Exchange(server, self._names, name, self.life)
        self.deletions = Deletions()
        self.peers = Peers()
        self.verbs = Verbs(models, tenants, loading)
        self.orders = Orders(self.life, self._carry_out, clock, self._say_soon)
        self._homes = homes or FleetHomes([], SaidMoves(clock))
        self._num_homes: dict[bytes, int] = {}  # that were heard, by life
        self._num_homes_said = 0
        self.own = OwnRows(self._names, lambda: self.deletions.clock)
        self._changes: dict[tuple[int, str, str], None] = {}
        self._server_now: tuple[float, float] | None = None  # and our own clock at that moment
        self.is_away = True
        self._settled = asyncio.Event()
        self._hurry = asyncio.Event()
        self._waiting: list[asyncio.Future[bool]] = []  # for a round that begins now or later
        self._number = 0
        self._said_at = float("-inf")
        self._num_deletions = 0
        self._recent: deque[tuple[bytes, int]] = deque(maxlen=MAX_RECENT)
        self._to_say = True  # the board has changed
        self._deletions_changed = False
        self._deletions_said_at = float("-inf")
        self._rewritten_at = self._begun_at = float("-inf")
        self.removals = Removals(models, tenants, self.own)
        for number, model in enumerate(models):
            model.sessions.observe(Changes(number, self._changes))
            model.sessions.heed(partial(self.among, model))

    # ---- rounds

    async def run(self) -> None:
        """Do rounds until cancelled."""
        while True:
            try:
                await self.round()
            except TierUnavailable as error:
                if not self.is_away:
                    log.warning("the directory of sessions is away: %s", error)
                self.is_away = True
                self._answer_waiting(False)
            except Exception:  # the edge of a task: the next round may succeed
                log.exception("a round of the directory failed")
                self._answer_waiting(False)
            with suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._hurry.wait()
            self._hurry.clear()
            await asyncio.sleep(LEAST_PAUSE_S)

    async def round(self) -> None:
        """Write the changes, and take over those of others. Raises ``TierUnavailable``."""
        waiting, self._waiting = self._waiting, []
        now = self._clock()
        self._gather()
        if now - self._rewritten_at >= REWRITE_S:
            self.own.change_all()
            self._rewritten_at = now
        pages = {x: self.own.page(x) for x in list(self.own.changed)[:MAX_PAGES]}
        self.own.changed.difference_update(pages)
        packed = self._packed_deletions(now)
        board = self._board(now)
        try:
            seen = await asyncio.to_thread(self._exchange.round, board, pages, packed)
        except BaseException:
            self.own.changed.update(pages)
            if packed is not None:
                self._deletions_changed, self._deletions_said_at = True, float("-inf")
            self._to_say = True
            self._waiting[:0] = waiting
            raise
        if self.is_away:
            log.info("this server takes part in the directory of sessions, as %s", self.name)
        self.is_away = False
        self._take(seen, now)
        self._settled.set()
        for future in waiting:
            if not future.done():
                future.set_result(True)
        if self.own.changed or self._changes:
            self._hurry.set()

    def _answer_waiting(self, said: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(said)

    def _gather(self) -> None:
        """Bring rows up to date with the tables of sessions."""
        for number, tenant, id in list(self._changes)[:MAX_CHANGES]:
            model = self._models[number]
            label = model.label
            if not label:
                continue  # its engine has not said its name yet
            del self._changes[number, tenant, id]
            key, view = OwnKey(tenant, label, id), model.sessions.get(SessionRef(tenant, id, b""))
            if view is None:
                self.own.drop(key)
            else:
                self.own.put(key, view, self.server_now() - view.idle_s)

    def _packed_deletions(self, now: float) -> bytes | None:
        full = len(self._recent) == MAX_RECENT
        if not self._deletions_changed or not (
            full or now - self._deletions_said_at >= ALL_DELETIONS_S
        ):
            return None
        self._deletions_changed, self._deletions_said_at = False, now
        self._recent.clear()
        self._to_say = True
        return self.deletions.pack()

    def _board(self, now: float) -> Board | None:
        """Write our board, if there is something new or others have to see that we live."""
        if self._homes.said.num != self._num_homes_said:
            self._num_homes_said, self._to_say = self._homes.said.num, True
        if not self._to_say and now - self._said_at < SIGN_OF_LIFE_S:
            return None
        self._to_say, self._said_at = False, now
        self._number += 1
        orders, answers = self.orders.said(self._number)
        return Board(
            name=self.name,
            life=self.life,
            number=self._number,
            at=self.server_now(),
            clock=self.deletions.clock,
            num_deletions=self._num_deletions,
            recent=list(self._recent),
            orders=orders,
            answers=answers,
            num_homes=self._homes.said.num,
            homes=list(self._homes.said.recent()),
        )

    def _take(self, seen: Seen, now: float) -> None:
        jumped = self._server_now is None or abs(self.server_now() - seen.now) > JUMP_S
        self._server_now = seen.now, now
        if jumped:
            for number, model in enumerate(self._models):
                tables = model.sessions.table
                self._changes.update({(number, x.ref.tenant, x.ref.id): None for x in tables})
        if seen.is_new and now - self._begun_at >= SIGN_OF_LIFE_S:
            self._begin_anew(now)
        for board in seen.boards:
            self.deletions.see(board.clock)
            if self.peers.see(board, now, seen.now):
                self.orders.take(board)
                self._hear_homes(board)
        for mark, epoch in seen.deletions:
            if self.deletions.add(mark, epoch):
                self._deletions_changed = True
                self.removals.begin(self.own.marked(mark, epoch), epoch)

    def _begin_anew(self, now: float) -> None:
        """Write everything again: it is the first round, or the server was emptied."""
        self._begun_at = now
        self.own.change_all()
        self._to_say = True
        self._deletions_changed = bool(len(self.deletions))
        self._deletions_said_at = float("-inf")

    def _say_soon(self) -> None:
        self._to_say = True
        self._hurry.set()

    async def _carry_out(self, order: Order) -> Result:
        return await self.verbs.carry_out(order, self.name)

    def _hear_homes(self, board: Board) -> None:
        """Take over where sessions have moved since that server's last board."""
        known = self._num_homes.get(board.life, 0)
        self._num_homes = {
            x.life: x.num_homes if x.life == board.life else self._num_homes.get(x.life, 0)
            for x in self.peers.boards()
        }
        num_new = min(board.num_homes - known, len(board.homes))
        if num_new > 0:
            moves = [Move(*x) for x in board.homes[-num_new:]]
            for homes in self._homes.fleets:
                homes.hear(moves)

    def server_now(self) -> float:
        """Return the Redis server's time, in seconds; 0 before the first round."""
        if self._server_now is None:
            return 0.0
        server_now, at = self._server_now
        return server_now + self._clock() - at

    # ---- deletions

    async def delete(self, tenant: str, ids: Iterable[str], model: str = "") -> bool:
        """Have all servers remove sessions; returns False if they learn of it later.

        Args:
            model: its name; "" = of all models.
        """
        self.note_deleted(tenant, ids, model)
        return not self.is_away and await self._said()

    def note_deleted(self, tenant: str, ids: Iterable[str], model: str = "") -> None:
        """Note what ``delete`` says to others in the next round."""
        self._gather()  # what began before this
        epoch = self.deletions.clock + 1
        for id in ids:
            mark = self._names.mark(tenant, model, id)
            if len(self._recent) == MAX_RECENT:  # then all of them are said in the next round
                self._recent.popleft()
                self._deletions_said_at = float("-inf")
            self._recent.append((mark, epoch))
            self._num_deletions += 1
            self.deletions.add(mark, epoch)
            for key in self.own.marked(mark, epoch):
                self.own.drop(key)
        self._to_say = self._deletions_changed = True

    async def _said(self) -> bool:
        """Wait until a round has written what is to be said now; False if it did not."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._hurry.set()
        try:
            async with asyncio.timeout(SAID_S):
                return bool(await future)
        except TimeoutError:
            return False

    async def among(
        self, model: ServedModel, reports: Iterable[SessionReport]
    ) -> list[SessionReport]:
        """See ``scheduler.follower.Deleted``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ROUND_S):
                await self._settled.wait()
        label, found = model.label, []
        if not len(self.deletions):
            return []
        for i, report in enumerate(reports):
            if i % LOOK_AT_ONCE == 0:
                await asyncio.sleep(0)
            epoch = self.deleted_at(report.tenant, label, report.id)
            if epoch and not await self._began_since(
                OwnKey(report.tenant, label, report.id), epoch
            ):
                found.append(report)
        return found

    def deleted_at(self, tenant: str, model: str, id: str) -> int:
        """Return the epoch of the latest deletion of a session; 0 if none is known."""
        marks = (self._names.mark(tenant, model, id), self._names.mark(tenant, "", id))
        return max(self.deletions.epoch(x) for x in marks)

    async def _began_since(self, key: OwnKey, epoch: int) -> bool:
        """Say whether any server reports that the session began after that deletion."""
        if (row := self.own.row(key)) is not None:
            return row.epoch >= epoch
        lives = [*self._exchange.former_lives, *(x.life for x in self.peers.boards())]
        try:
            rows = await asyncio.to_thread(self._exchange.rows, lives, key.tenant, key.id)
        except TierUnavailable:
            return False
        return any(x.model == key.model and x.epoch >= epoch for _, x in rows)

    # ---- other servers' sessions

    async def ask(
        self, holder: Elsewhere, verb: str, tenant: str, tier: TierName | None = None
    ) -> Result:
        """Have the server that has a session carry out a verb; 503 without a body if it cannot."""
        board = self.peers.by_life(holder.life)
        if board is None or not self.peers.lives(board.name, self._clock()) or self.is_away:
            return Result(503, b"")
        row = holder.row
        try:
            return await self.orders.ask(board, verb, tenant, row.model, row.id, tier)
        except (TimeoutError, TooManyOrders):
            return Result(503, b"")

    def page_key(self, tenant: str, id: str) -> str:
        """Return the name of the key that shows a session of this server."""
        return self._names.rows(self.life, tenant, page_of(id))

    async def elsewhere(self, tenant: str, id: str | None = None) -> list[Elsewhere]:
        """List the sessions that others have of a tenant, those of living servers first.

        Raises ``TierUnavailable``: the Redis server does not answer.
        """
        if self.is_away:
            raise TierUnavailable("the directory of sessions is away")
        boards = {x.life: x for x in self.peers.boards()}
        rows = await asyncio.to_thread(self._exchange.rows, list(boards), tenant, id)
        now, server_now, found = self._clock(), self.server_now(), []
        for life, row in rows:
            self.deletions.see(row.epoch)
            if self.deleted_at(tenant, row.model, row.id) > row.epoch:
                continue
            name = boards[life].name
            idle_s = max(0.0, server_now - row.used)
            found.append(Elsewhere(row, life, name, self.peers.lives(name, now), idle_s))
        return sorted(found, key=lambda x: (not x.lives, x.idle_s))
