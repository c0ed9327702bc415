"""The gateway's client of an engine process: HTTP for data, ``engines.wire`` for control.

``EngineClient`` talks to the two addresses of a running engine. It suffices for an engine that was
started elsewhere; ``engines.client.child_engine`` adds a process that we start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from engines.base import (
    SAVE_S,
    Demoted,
    EngineError,
    EngineStalled,
    EngineUnavailable,
    EngineUnreached,
    Upstream,
)
from engines.client.connection import HttpAddress, HttpExchange
from engines.client.control_link import SILENCE_S, ControlLink, check_control
from engines.client.second_try import Candidate, RequestBody, SecondTry
from engines.config import CalibrationOrder, WorkerConfig
from engines.http import session_headers, with_session
from engines.wire import (
    Adopt,
    Adopted,
    CodecReport,
    Demote,
    Done,
    EngineReport,
    Forget,
    GetStats,
    LimitTenants,
    ListSessions,
    Measure,
    Notice,
    Pin,
    Prefetch,
    SessionRef,
    SessionReport,
    Sessions,
    Stats,
    TenantUses,
    TierName,
    Unpin,
    Verb,
    VerbAnswer,
    Welcome,
)
from kvstore.session import TenantLimits

# Deadlines of verbs, in seconds.
ANSWER_S = 15.0  # verbs that move no KV
LIMITS_S = 2.0  # limits of tenants, which are sent again later in any case
MOVE_S = 90.0  # verbs that may move KV

A = TypeVar("A", bound=VerbAnswer)


class EngineClient:
    """An ``engines.base.Engine`` that talks to the two addresses of a running engine."""

    def __init__(self, worker: WorkerConfig, env: Mapping[str, str] | None = None) -> None:
        """``env`` is unused here; subclasses that start a process use it."""
        url, control = worker.engine.url, worker.engine.control
        self._address = HttpAddress(f"{worker.runtime_dir}/http.sock", url)
        self._bearer = {"authorization": f"Bearer {worker.token}"}
        self._stall_timeout_s = worker.engine.stall_timeout_s
        self._link = ControlLink(
            control or f"unix:{worker.runtime_dir}/control.sock",
            worker.token,
            welcome_timeout_s=worker.engine.start_timeout_s,
            silence_s=min(SILENCE_S, self._stall_timeout_s),
            why_absent=self.why_absent(control),
            on_lost=self._link_lost,
        )
        self._running_link: asyncio.Task[None] | None = None
        self._exchanges: set[HttpExchange] = set()
        self._stopping = False

    @staticmethod
    def why_absent(control: str) -> str:
        """Return the reason to report while no server listens at the control address."""
        return "the engine is starting"

    # ---- life

    @property
    def welcome(self) -> Welcome | None:
        return None if self._stopping else self._link.welcome

    @property
    def codec(self) -> CodecReport | None:
        return None if self._stopping else self._link.codec

    @property
    def ready(self) -> bool:
        return self.welcome is not None

    @property
    def trouble(self) -> str:
        return "the gateway is shutting down" if self._stopping else self._link.trouble

    @property
    def gave_up(self) -> bool:
        return False

    async def start(self) -> None:
        self._stopping = False
        self._running_link = asyncio.create_task(self._link.run(), name="engine-control")

    def restart(self, why: str) -> None:
        pass

    async def stop(self, drain_s: float, save_s: float = SAVE_S) -> None:
        self._stopping = True
        await self._drain(drain_s)
        for exchange in list(self._exchanges):
            exchange.fail(EngineUnavailable("the gateway is shutting down"))
        if self._running_link is not None:
            self._running_link.cancel()
            await asyncio.wait([self._running_link])
            self._running_link = None
            self._link.forget()

    async def _drain(self, drain_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + drain_s
        while self._exchanges and loop.time() < end:
            await asyncio.sleep(0.05)

    # ---- data

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float | None = None
    ) -> AsyncIterator[Upstream]:
        sent = RequestBody(body)
        del body  # megabytes perhaps, and the answer may take an hour
        if wait_s is None:
            async with self._asked(path, headers, sent) as exchange:
                yield exchange
            return
        asked = SecondTry(partial(self._candidate, path, headers, wait_s))
        try:
            await asked.begin(sent)
            yield asked
        finally:
            await asked.close()

    def _candidate(
        self, path: str, headers: Mapping[str, str], wait_s: float, excluded: Welcome | None
    ) -> Candidate:
        return Candidate(
            "",
            lambda: self._link.welcome,
            partial(self._asked, path, headers),
            wait_s,
            lambda: self._stopping or self.gave_up,
        )

    @asynccontextmanager
    async def _asked(
        self, path: str, headers: Mapping[str, str], body: RequestBody
    ) -> AsyncIterator[HttpExchange]:
        """Send the request, wait for the head of the response, and yield the exchange."""
        if not self.ready:
            raise EngineUnreached(self.trouble)
        exchange = HttpExchange(self._address, self._stall_timeout_s)
        self._exchanges.add(exchange)
        try:
            await exchange.send(path, {**headers, **self._bearer}, body.content)
            body.sent()
            await exchange.head()
            yield exchange
        finally:
            exchange.close()
            self._exchanges.discard(exchange)

    def session_headers(self, session: SessionRef) -> dict[str, str]:
        return session_headers(session)

    def prepare_body(self, body: dict[str, object], session: SessionRef) -> dict[str, object]:
        return body

    def _link_lost(self, why: str) -> None:
        """Fail the exchanges that are no streams; streams notice a dead engine by themselves."""
        for exchange in list(self._exchanges):
            if not exchange.is_stream:
                exchange.fail(EngineStalled(why))

    # ---- control

    async def demote(self, session: SessionRef, tier: TierName | None = None) -> Demoted:
        done = await self._done(Demote(session, tier), MOVE_S)
        return Demoted(done.report, done.kept)

    async def prefetch(self, session: SessionRef) -> SessionReport | None:
        return (await self._done(Prefetch(session), MOVE_S)).report

    async def pin(self, session: SessionRef, pinned: bool) -> SessionReport | None:
        return (await self._done(Pin(session) if pinned else Unpin(session), ANSWER_S)).report

    async def forget(self, session: SessionRef) -> SessionReport | None:
        return (await self._done(Forget(session), MOVE_S)).report

    async def sessions(self) -> list[SessionReport]:
        page = await self._page(None)
        reports = page.sessions
        while page.more and page.sessions:
            last = page.sessions[-1]
            page = await self._page((last.tenant, last.id))
            reports += page.sessions
        return reports

    async def _page(self, after: tuple[str, str] | None) -> Sessions:
        return await self._ask(ListSessions(after), Sessions, ANSWER_S)

    async def stats(self) -> EngineReport:
        return (await self._ask(GetStats(), Stats, ANSWER_S)).report

    async def adopt(self) -> CodecReport:
        return (await self._ask(Adopt(), Adopted, MOVE_S)).codec

    async def measure(self, order: CalibrationOrder | None = None) -> CodecReport:
        return (await self._ask(Measure(order), Adopted, ANSWER_S)).codec

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses:
        """See ``engines.base.LimitsTenants``."""
        return await self._ask(LimitTenants(dict(tiers)), TenantUses, LIMITS_S)

    def notices(self) -> AsyncIterator[Notice | None]:
        return self._link.notices.read()

    async def _done(self, verb: Verb, deadline_s: float) -> Done:
        return await self._ask(verb, Done, deadline_s)

    async def _ask(self, verb: Verb, kind: type[A], deadline_s: float) -> A:
        """Return the answer to a verb. Raises ``EngineError`` if it is of another kind."""
        answer = await self._link.ask(verb, deadline_s)
        if isinstance(answer, kind):
            return answer
        said = type(answer).__name__
        raise EngineError(f"the engine answered {type(verb).__name__} with {said}")


class AttachedEngine(EngineClient):
    """An engine that was started elsewhere; it is left running when the gateway ends."""

    def __init__(self, worker: WorkerConfig, env: Mapping[str, str] | None = None) -> None:
        if not worker.engine.url or not worker.engine.control:
            raise EngineError(
                "attaching needs both addresses of the engine: engine.url (http://host:port)"
                " and engine.control (unix:/path or tcp://host:port); a vLLM without our plug-in"
                " has no control address: docs/hardware.md says how to start one that has"
            )
        check_control(worker.engine.control)
        super().__init__(worker, env)

    @staticmethod
    def why_absent(control: str) -> str:
        return (
            f"nothing listens at {control}: the engine has not been started there, or without our"
            " plug-in (docs/hardware.md says how)"
        )

    def prepare_body(self, body: dict[str, object], session: SessionRef) -> dict[str, object]:
        """Return the body with the session in vLLM's own fields, if the engine is vLLM."""
        is_vllm = self.welcome is not None and self.welcome.engine == "vllm"
        return with_session(body, session) if is_vllm else body
