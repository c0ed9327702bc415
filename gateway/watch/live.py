"""Keeps account of everything that happens to requests and sessions, and shows readers their part.

Without readers, all that this costs is a few sums and a bounded memory of each session's past.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version

import msgspec
from msgspec import UNSET

from engines.base import Engine, EngineError, EngineReport, SessionRef
from gateway.watch.figures import Sums, Verdicts, memory_shown, quality_shown
from gateway.watch.metrics import Metrics
from gateway.watch.requests import LiveRequest, of_tenant
from gateway.watch.rows import Histories, Key, Rows
from gateway.watch.shape import (
    Activity,
    HourlySpeeds,
    KVPlace,
    Move,
    RequestStatus,
    ServerStatus,
    SessionDetail,
    Snapshot,
    TenantStatus,
)
from gateway.watch.snapshots import Snapshots
from gateway.watch.tally import HOUR_S, STEP_S, PrefillSpeed, Tallies
from scheduler.session import Observer, Step
from scheduler.sessions import SessionManager

ASK_S = 0.5  # that the engine may take to answer
STALE_S = 3.0  # of the engine's figures
MAX_REQUESTS = 400  # shown
MAX_TENANTS = 200  # shown
TENANTS_AT_ONCE = 50  # then others get their turn
DIALECTS = ("chat.completions", "completions", "responses", "messages")
COARSE_BYTES = 64 << 20  # the machine's memory changes all the time; smaller steps mean nothing


class Live(Observer):
    """The live state of one app. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        sessions: SessionManager,
        metrics: Metrics,
        *,
        name: str = "",
        loading: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            name: of the model; "" = as the engine says.
            loading: returns the state of a model on demand, such as "unloaded"; "" of others.
            clock: the scheduler's.
        """
        self._name = name
        self._loading = loading
        self._metrics = metrics
        self._engine = engine
        self._sessions = sessions
        self._clock = clock
        self._wall = wall
        self._started_at = round(wall(), 3)
        self._started = clock()
        self._version = version("thermocline")
        self._requests: dict[LiveRequest, None] = {}
        self._serving: defaultdict[Key, dict[LiveRequest, None]] = defaultdict(dict)
        self.histories = Histories(wall)
        self._rows = Rows(
            sessions.table,
            self.histories,
            lambda key: self._serving.get(key, {}),
            lambda: engine.welcome,
            clock,
            wall,
        )
        self._num_moves = 0
        self._speed = PrefillSpeed()
        self._tallies = Tallies(wall)
        self.report: EngineReport | None = None  # the latest
        self._verdicts = Verdicts(wall)
        self._reported_at = float("-inf")
        self.snapshots = Snapshots(self._rows, self._snapshot, clock)
        self._ended = False
        sessions.observe(self)

    # ---- requests

    @contextmanager
    def request(
        self, ref: SessionRef, id: str, operation: str, client: str
    ) -> Iterator[LiveRequest]:
        """Follow a request while it is served; at its end its session's history has one more."""
        model = self._engine.welcome.model if self._engine.welcome else ""
        at, clock = self._wall(), self._clock
        key = (ref.tenant, ref.id)
        request = LiveRequest(ref, id, operation, client, at, clock, self._metrics, model)
        session = self._rows.session(key)
        request.is_first = session is None or not session.known
        self._requests[request] = self._serving[key][request] = None
        try:
            yield request
        finally:
            request.ended()
            self._count(request)
            del self._requests[request], self._serving[key][request]
            if not self._serving[key]:
                del self._serving[key]
            self._take(request)

    def _count(self, request: LiveRequest) -> None:
        for stretch in request.uncounted():
            for tally in self._tallies.counting(request.ref.tenant):
                tally.count(stretch)

    def _take(self, request: LiveRequest) -> None:
        if not request.in_engine:  # the engine never had it: refused, or its client left
            return
        self._speed.learn(request, self._engine.codec)
        saved_s = self._speed.saved_s(request)
        if saved_s and request.cache is not None:
            self._metrics.saved(request.cache.source, saved_s)
        for tally in self._tallies.counting(request.ref.tenant):
            tally.add(request, saved_s)
        key = (request.ref.tenant, request.ref.id)
        if self._rows.session(key) is not None:
            self.histories.turned(key, request.turn(saved_s), request.title)

    # ---- reports of the scheduler

    def transition(self, ref: SessionRef, step: Step) -> None:
        key = (ref.tenant, ref.id)
        if step.left:
            for tally in self._tallies.counting(ref.tenant):
                tally.left(step.left, step.why)
        if step.after in ("gone", "leaving"):
            self.histories.forget(key)
            return
        before, after = self.histories.stepped(key, step)
        if before != after:
            self._moved(key, step, before, after)

    def _moved(self, key: Key, step: Step, before: KVPlace, after: KVPlace) -> None:
        session = self._rows.session(key)
        if session is None or not session.known:  # the engine refused its first turn
            return
        self._num_moves += 1
        hot_bytes = self._rows.hot_bytes(session)
        moved = Move(
            number=self._num_moves,
            at=round(self._wall(), 3),
            id=session.ref.id,
            tenant=session.ref.tenant,
            before=before,
            after=after,
            event=step.event,
            why=step.why,
            tokens=session.tokens,
            bytes=hot_bytes if after == "hot" else session.cold_bytes,
            bf16_bytes=self._rows.bf16_bytes(session.tokens),
        )
        everybodys, own = self._tallies.counting(session.ref.tenant)
        everybodys.moves.append(moved)
        own.moves.append(msgspec.structs.replace(moved, tenant=UNSET))

    def engine_reported(self, report: EngineReport) -> None:
        self.report = report
        self._verdicts.note(self._engine.codec)
        self._reported_at = self._clock()
        reported = {(x.tenant, x.session): x for x in report.requests}
        for request in self._requests:
            key = (request.ref.tenant, request.ref.id)
            request.progress = reported.get(key, request.progress)

    # ---- readers

    def end(self) -> None:
        """Note that the server is shutting down."""
        self._ended = True

    async def _ask_engine(self) -> None:
        """Ask the engine for its figures where the sweeps do not: it serves without sleep."""
        if not self._engine.ready:
            self.report = None
        elif self._clock() - self._reported_at > STALE_S:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(ASK_S):
                    self.engine_reported(await self._engine.stats())

    def title(self, tenant: str, id: str) -> str:
        """Return a session's title; "" if it has none, or titles are not kept."""
        past = self.histories.of((tenant, id))
        return past.title if past else ""

    def detail(self, ref: SessionRef, *, admin: bool) -> SessionDetail | None:
        """Show one session with its past; None if it is unknown."""
        key = (ref.tenant, ref.id)
        session = self._rows.session(key)
        if session is None:
            return None
        past = self.histories.of(key)
        return SessionDetail(
            row=self._rows.shown(session, admin=admin),
            timeline=list(past.steps) if past else [],
            last_turns=list(past.turns) if past else [],
        )

    # ---- the parts of a moment

    async def _snapshot(self, tenant: str | None, sums: Sums) -> Snapshot:
        """Show this moment, but for the sessions."""
        await self._ask_engine()
        for request in self._requests:
            self._count(request)
        codec, welcome = self._engine.codec, self._engine.welcome
        tally, (hour, moves) = self._tallies.shown(tenant), self._past(tenant)
        return Snapshot(
            server=self._server(tenant),
            now=self._now(tenant),
            memory=memory_shown(
                sums,
                self.report,
                codec,
                tally.outcomes,
                tally.departures,
                self._sessions.water_marks,
                admin=tenant is None,
            ),
            quality=quality_shown(
                codec, welcome is not None and welcome.can_measure, self._verdicts.note(codec)
            ),
            hour=hour,
            moves=moves,
            tenants=await self._tenants(sums) if tenant is None else [],
            num_sessions=sums.num_sessions,
            sessions=[],
        )

    def _past(self, tenant: str | None) -> tuple[HourlySpeeds, list[Move]]:
        """Show the last hour."""
        tally, now, wall = self._tallies.shown(tenant), self._clock(), self._wall()
        since, prompts, answers = tally.hour(now, self._started)
        hour = HourlySpeeds(
            since=round(wall - (now - since), 3),
            step_s=STEP_S,
            prompt_tokens_per_s=prompts,
            answer_tokens_per_s=answers,
        )
        return hour, [x for x in tally.moves if x.at > wall - HOUR_S]

    def _server(self, tenant: str | None) -> ServerStatus:
        welcome = self._engine.welcome
        return ServerStatus(
            model=self._name or (welcome.model if welcome else None),
            engine=welcome.engine if welcome else None,
            engine_version=welcome.engine_version if welcome else None,
            version=self._version,
            started_at=self._started_at,
            ready=self._engine.ready,
            loading=self._loading(),
            trouble=self._engine.trouble,
            draining=self._ended,
            max_context=welcome.max_context if welcome else None,
            hibernation=welcome.hibernation if welcome else None,
            hibernation_reason=welcome.hibernation_reason if welcome else "",
            dialects=DIALECTS,
            admin=tenant is None,
            tenant=tenant,
        )

    def _now(self, tenant: str | None) -> Activity:
        mine, tally = of_tenant(self._requests, tenant), self._tallies.shown(tenant)
        tokens, seconds, turns = tally.today
        waiting = sum(not x.in_engine for x in mine)
        speed = self._speed.tokens_per_s
        available = self._sessions.headroom.available_bytes if tenant is None else None
        return Activity(
            running=len(mine) - waiting,
            waiting=waiting,
            requests=[_shown(x, tenant is None) for x in mine[:MAX_REQUESTS]],
            prompt_tokens_per_s=tally.prompts.rate(self._clock()),
            answer_tokens_per_s=tally.answers.rate(self._clock()),
            memory_available_bytes=available and available // COARSE_BYTES * COARSE_BYTES,
            prefill_tokens_per_s=round(speed, 1) if speed else None,
            saved_tokens_today=tokens,
            saved_s_today=seconds,
            turns_today=turns,
            first_token=tally.first_tokens.shown(),
        )

    async def _tenants(self, sums: Sums) -> list[TenantStatus]:
        """Show what each tenant has and uses; those of long ago, without sessions, are left out."""
        now, requests = self._clock(), Counter(x.ref.tenant for x in self._requests)
        in_engine = Counter(x.ref.tenant for x in self._requests if x.in_engine)
        all_tokens = self._tallies.shown(None).tokens_last_hour(now)
        shown = []
        for at, name in enumerate(self._tallies.names() | set(sums.of) | set(requests), 1):
            if at % TENANTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            tally, own = self._tallies.shown(name), sums.of[name]
            tokens = tally.tokens_last_hour(now)
            if not (tokens or own.num_sessions or requests[name]):
                continue
            shown.append(
                TenantStatus(
                    name=name,
                    sessions=own.num_sessions,
                    hot_bytes=own.hot_bytes,
                    cold_bytes=own.cold_bytes,
                    running=in_engine[name],
                    waiting=requests[name] - in_engine[name],
                    tokens_last_hour=tokens,
                    share=round(tokens / all_tokens, 3) if all_tokens else None,
                    wait_p95_s=tally.wait_p95_s,
                    saved_tokens_today=tally.today[0],
                )
            )
        shown.sort(key=lambda x: (-x.tokens_last_hour, x.name))
        return shown[:MAX_TENANTS]


def _shown(request: LiveRequest, admin: bool) -> RequestStatus:
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
