"""Makes snapshots of one model for its readers, at most one a second for each tenant.

All readers of a tenant get the same snapshot, with a tag by which they see whether it has changed;
a reader who asks for fewer rows gets the first of them. After each snapshot at least ``REST`` times
the time passes that it took, so that even with very many sessions, snapshots take a small part of
the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET

from engines.base import EngineError, SessionRef
from gateway.watch.figures import Sums, memory_shown, quality_shown
from gateway.watch.live import Live
from gateway.watch.requests import LiveRequest
from gateway.watch.shape import (
    Activity,
    HourlySpeeds,
    RequestStatus,
    ServerStatus,
    SessionDetail,
    SessionStatus,
    Snapshot,
    TenantStatus,
)
from gateway.watch.tally import HOUR_S, STEP_S
from scheduler.session import AWAY, Session

EVERY_S = 1.0
REST = 20.0
LINGER_S = 60.0  # for which a snapshot is kept without a reader
ASK_S = 0.5  # for the engine's answer
STALE_S = 3.0  # older figures of the engine are asked for again
MAX_ROWS = 2000
MAX_REQUESTS = 400  # shown
MAX_TENANTS = 200  # shown
SIZES = (500, MAX_ROWS)  # rows of the snapshots that are kept
ROWS_AT_ONCE = 250  # between two yields to the event loop
TENANTS_AT_ONCE = 50
DIALECTS: Final = ("chat.completions", "completions", "responses", "messages")
COARSE_BYTES = 64 << 20  # steps of the machine's memory, which changes all the time
LEAST_RATIO = 1.05  # a lower one is not shown: exact copies, with headers, are not packed
_encode = msgspec.json.Encoder().encode


class Made(NamedTuple):
    """A snapshot and its encoded form."""

    shown: Snapshot
    body: bytes
    tag: str  # a hash of ``body``
    until: float  # the time, by ``Live.clock``, at which a new one may be made
    asked: float  # the time of the last request for it


class Snapshots:
    """Makes and keeps the snapshots of one model. Runs on the event loop."""

    def __init__(
        self, live: Live, *, name: str = "", loading: Callable[[], str] = lambda: ""
    ) -> None:
        """
        Args:
            name: the model's name; "" = the engine names it.
            loading: returns the state of a model on demand, such as "unloaded"; "" for others.
        """
        self._live = live
        self._name = name
        self._loading = loading
        self._started_at = round(live.wall(), 3)
        self._started = live.clock()
        self._version = version("thermocline")
        self._made: dict[tuple[str | None, int], Made] = {}
        self._making: defaultdict[tuple[str | None, int], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, tenant: str | None, most: int) -> Made:
        """Return a snapshot that is at most about a second old.

        Args:
            tenant: the tenant whose sessions are shown; None = all tenants, for admins.
            most: the number of sessions to list, those used last.
        """
        key, clock = (tenant, next((x for x in SIZES if x >= most), MAX_ROWS)), self._live.clock
        async with self._making[key]:
            made, now = self._made.get(key), clock()
            if made is None or now >= made.until:
                shown = await self._make(*key)
                body = _encode(shown)
                tag = hashlib.blake2b(body, digest_size=12).hexdigest()
                until = now + max(EVERY_S, REST * (clock() - now))
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

    def detail(self, ref: SessionRef) -> SessionDetail | None:
        """Return one session with its history, as its tenant may see it; None if unknown."""
        key = (ref.tenant, ref.id)
        session, past = self._live.row(key), self._live.histories.of(key)
        if session is None:
            return None
        return SessionDetail(
            row=self._row(session, admin=False),
            timeline=list(past.steps) if past else [],
            last_turns=list(past.turns) if past else [],
        )

    async def _make(self, tenant: str | None, most: int) -> Snapshot:
        live, admin = self._live, tenant is None
        rows, sums = live.rows(tenant), Sums()
        for at, session in enumerate(rows, 1):
            in_bf16 = live.bf16_bytes(session.cold_tokens) if session.cold_bytes else 0
            is_away = self._state(session) == AWAY
            sums.add(session, live.hot_bytes(session) or 0, in_bf16 or 0, is_away)
            if at % (8 * ROWS_AT_ONCE) == 0:
                await asyncio.sleep(0)
        shown: list[SessionStatus] = []
        for session in heapq.nlargest(most, rows, key=lambda x: x.last_used):
            shown.append(self._row(session, admin=admin))
            if len(shown) % ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        await self._ask_engine()
        for request in live.requests():
            live.count(request)
        codec, welcome, tally = live.engine.codec, live.engine.welcome, live.tallies.shown(tenant)
        can_measure = welcome is not None and welcome.can_measure
        return Snapshot(
            server=self._server(tenant),
            now=self._now(tenant),
            memory=memory_shown(
                sums, live.report, codec, tally, live.sessions.water_marks, admin=admin
            ),
            quality=quality_shown(codec, can_measure, live.verdicts.note(codec)),
            hour=self._hour(tenant),
            moves=[x for x in tally.moves if x.at > live.wall() - HOUR_S],
            tenants=await self._tenants(sums) if admin else [],
            num_sessions=len(rows),
            sessions=shown,
        )

    async def _ask_engine(self) -> None:
        """Ask the engine for its figures if no sweep has: sweeps only run with hibernation."""
        live = self._live
        if not live.engine.ready:
            live.report = None
        elif live.clock() - live.reported_at > STALE_S:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(ASK_S):
                    live.engine_reported(await live.engine.stats())

    def _server(self, tenant: str | None) -> ServerStatus:
        engine = self._live.engine
        welcome = engine.welcome
        return ServerStatus(
            model=self._name or (welcome.model if welcome else None),
            engine=welcome.engine if welcome else None,
            engine_version=welcome.engine_version if welcome else None,
            version=self._version,
            started_at=self._started_at,
            ready=engine.ready,
            loading=self._loading(),
            trouble=engine.trouble,
            draining=self._live.draining,
            max_context=welcome.max_context if welcome else None,
            hibernation=welcome.hibernation if welcome else None,
            hibernation_reason=welcome.hibernation_reason if welcome else "",
            dialects=DIALECTS,
            admin=tenant is None,
            tenant=tenant,
        )

    def _now(self, tenant: str | None) -> Activity:
        live = self._live
        mine, tally, now = live.requests(tenant), live.tallies.shown(tenant), live.clock()
        tokens, seconds, turns = tally.today
        waiting = sum(not x.in_engine for x in mine)
        speed = live.speed.tokens_per_s
        available = live.sessions.headroom.available_bytes if tenant is None else None
        return Activity(
            running=len(mine) - waiting,
            waiting=waiting,
            requests=[_request(x, tenant is None) for x in mine[:MAX_REQUESTS]],
            prompt_tokens_per_s=tally.paces["computed"].rate(now),
            answer_tokens_per_s=tally.paces["answered"].rate(now),
            memory_available_bytes=available and available // COARSE_BYTES * COARSE_BYTES,
            prefill_tokens_per_s=round(speed, 1) if speed else None,
            saved_tokens_today=tokens,
            saved_s_today=seconds,
            turns_today=turns,
            first_token=tally.first_tokens(),
        )

    def _hour(self, tenant: str | None) -> HourlySpeeds:
        live = self._live
        now = live.clock()
        since, prompts, answers = live.tallies.shown(tenant).hour(now, self._started)
        return HourlySpeeds(
            since=self._unix(since),
            step_s=STEP_S,
            prompt_tokens_per_s=prompts,
            answer_tokens_per_s=answers,
        )

    async def _tenants(self, sums: Sums) -> list[TenantStatus]:
        """Return the sums of each tenant that has sessions, or used tokens in the last hour."""
        live = self._live
        now, requests = live.clock(), live.requests()
        served = Counter(x.ref.tenant for x in requests)
        in_engine = Counter(x.ref.tenant for x in requests if x.in_engine)
        all_tokens = live.tallies.shown(None).tokens_last_hour(now)
        shown = []
        for at, name in enumerate(live.tallies.names() | set(sums.of) | set(served), 1):
            if at % TENANTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            tally, own = live.tallies.shown(name), sums.of[name]
            tokens = tally.tokens_last_hour(now)
            if not (tokens or own.num_sessions or served[name]):
                continue
            shown.append(
                TenantStatus(
                    name=name,
                    sessions=own.num_sessions,
                    hot_bytes=own.hot_bytes,
                    cold_bytes=own.cold_bytes,
                    running=in_engine[name],
                    waiting=served[name] - in_engine[name],
                    tokens_last_hour=tokens,
                    share=round(tokens / all_tokens, 3) if all_tokens else None,
                    wait_p95_s=tally.wait_p95_s,
                    saved_tokens_today=tally.today[0],
                )
            )
        shown.sort(key=lambda x: (-x.tokens_last_hour, x.name))
        return shown[:MAX_TENANTS]

    def _state(self, session: Session) -> str:
        return session.shown_state(self._live.engine.welcome is not None)

    def _row(self, session: Session, *, admin: bool) -> SessionStatus:
        """Return a session's row, from the table, its history and its running requests."""
        live, key = self._live, (session.ref.tenant, session.ref.id)
        past, serving = live.histories.of(key), live.served(key)
        last = past.turns[-1] if past and past.turns else None
        now = serving[-1] if serving else None
        cache = now.cache if now else None
        title = (now.title if now else "") or (past.title if past else "")
        num_tokens, in_bf16 = live.tokens(session), live.bf16_bytes(session.cold_tokens)
        state = self._state(session)
        retained = session.retain_until > live.clock()
        return SessionStatus(
            id=session.ref.id,
            tenant=session.ref.tenant if admin else UNSET,
            title=title or UNSET,
            client=now.client if now else last.client if last else None,
            parent=session.parent,
            kind=session.kind,
            state=state,
            tier=None if state == AWAY else session.tier,
            tokens=num_tokens,
            bytes=live.hot_bytes(session) if session.hot else session.cold_bytes,
            cold_bytes=session.cold_bytes,
            bf16_bytes=live.bf16_bytes(num_tokens),
            ratio=_ratio(in_bf16, session.cold_bytes),
            idle_since=None if session.num_turns else self._unix(session.last_used, 1),
            pinned=session.pinned,
            last_source=now.source if now and cache else last.source if last else None,
            last_reason=cache.reason if cache else last.reason if last else None,
            saved_tokens=past.saved_tokens if past else 0,
            saved_s=round(past.saved_s, 3) if past and past.saved_s is not None else None,
            turns=(past.num_turns if past else 0) + sum(x.in_engine for x in serving),
            retain_until=self._unix(session.retain_until, 1) if retained else None,
        )

    def _unix(self, reading: float, digits: int = 3) -> float:
        """Convert a reading of the scheduler's clock into Unix time."""
        return round(self._live.wall() + reading - self._live.clock(), digits)


def _ratio(in_bf16: int | None, cold_bytes: int) -> float | None:
    """Return the size in bf16 over the packed size; None if the KV is not packed."""
    if not in_bf16 or not cold_bytes or in_bf16 < LEAST_RATIO * cold_bytes:
        return None
    return round(in_bf16 / cold_bytes, 2)


def _request(request: LiveRequest, admin: bool) -> RequestStatus:
    return RequestStatus(
        id=request.id,
        tenant=request.ref.tenant if admin else UNSET,
        session=request.ref.id,
        client=request.client,
        operation=request.operation,
        started_at=round(request.at, 3),
        phase=request.phase_now,
        prompt_tokens=request.prompt_tokens,
        prefilled_tokens=request.prefilled_tokens,
        answered_tokens=request.answered_tokens,
        source=request.source,
        reason=request.cache.reason if request.cache else None,
    )
