"""Several engines of one model in one gateway, as one ``engines.base.Engine``.

A session stays at its home, the replica that had it last, or else the first of its ring that can be
asked; it moves when its home has many more requests than the next one. A move costs a restore from
a tier that all replicas share, or a prefill where there is none. If a replica ends, only
the contents of its memory are lost: requests that it had not begun to answer are sent once more to
another replica, and it is restarted as a single engine is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

from engines.base import (
    SAVE_S,
    CodecReport,
    Demoted,
    Engine,
    EngineError,
    EngineReport,
    EngineUnavailable,
    Notice,
    ReplicaState,
    SessionRef,
    SessionReport,
    TierName,
    Upstream,
    Welcome,
)
from engines.client.control_link import NoticeQueue
from engines.client.second_try import Candidate, RequestBody, SecondTry
from engines.config import CalibrationOrder
from engines.http import session_from
from engines.pool.replica import Replica, difference, joined_report, joined_welcome
from engines.pool.replica_choice import Homes, ReplicaChoice
from kvstore.session import SessionName

log = logging.getLogger("thermocline.engines")

# A session moves if its home has so many more requests than another replica: with a tier that all
# replicas share, and without one.
MOVES_AT: Final = 4
MOVES_AT_ALONE: Final = 16
LEAST_WAIT_S: Final = 0.5  # until a replica that ended has lost its control connection, too
FOLLOW_AGAIN_S: Final = 1.0


class ReplicaPool:
    """The replicas of one model, joined to one engine. Runs on the event loop."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        homes: Homes,
        moves_at: int = MOVES_AT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            engines: by their names, which decide which sessions each one gets.
            moves_at: a session moves if its home has so many more requests than another replica.
            clock: in seconds; only differences count.
        """
        self._clock = clock
        self._replicas = [Replica(name, x, clock) for name, x in engines.items()]
        self._choice = ReplicaChoice(self._replicas, homes, moves_at)
        self._homes = homes
        self._welcome: Welcome | None = None
        self._moves: Counter[str] = Counter()
        self._earlier: Counter[str] = Counter()  # of replicas that are gone
        self._notices = NoticeQueue()
        self._following: dict[str, asyncio.Task[None]] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self._stopping = False

    # ---- choice

    def _served(self, session: SessionRef, replica: Replica) -> None:
        """Note that a replica has taken a request, and drop the hot copy at its former home."""
        home = self._choice.home(session)
        self._homes.put(session, replica.name)
        for one in self._replicas:  # the session has begun again: do not delete it
            one.owed.discard(session)
        if home is None or home is replica:
            return
        why = "load" if home.takes else "away"
        self._moves[f"moved.{why}"] += 1
        log.info("session %s moved from replica %s to %s", session.id, home.name, replica.name)
        if home.takes:
            self._start_job(home.engine.demote(session))

    def _start_job(self, work: Coroutine[Any, Any, object]) -> None:
        async def done() -> None:
            with suppress(EngineError):  # that replica will evict it when it needs the room
                await work

        job = asyncio.create_task(done(), name="replica-job")
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        """The state of each replica; see ``engines.base.HasReplicas``."""
        return [x.state for x in self._replicas]

    @property
    def members(self) -> Mapping[str, Engine]:
        """See ``engines.base.HasReplicas``."""
        return {x.name: x.engine for x in self._replicas if x.takes}

    # ---- life

    @property
    def welcome(self) -> Welcome | None:
        if not self.ready:
            return None
        self._welcome = self._welcome or self._joined()
        return self._welcome

    def _joined(self) -> Welcome | None:
        welcomes = [x.engine.welcome for x in self._replicas if not x.differs]
        known = [x for x in welcomes if x is not None]
        return joined_welcome(known) if known else None

    @property
    def codec(self) -> CodecReport | None:
        return next((x.engine.codec for x in self._replicas if x.takes), None)

    @property
    def ready(self) -> bool:
        return not self._stopping and any(x.takes_beside(None) for x in self._replicas)

    @property
    def trouble(self) -> str:
        if self.ready:
            return ""
        return next((x.trouble for x in self._replicas if x.trouble), "the engine is starting")

    @property
    def gave_up(self) -> bool:
        return all(x.engine.gave_up for x in self._replicas)

    async def start(self) -> None:
        self._stopping, self._welcome = False, None
        await asyncio.gather(*(x.engine.start() for x in self._replicas))
        for replica in self._replicas:
            self._begin_following(replica)

    def _begin_following(self, replica: Replica) -> None:
        task = asyncio.create_task(self._follow(replica), name="replica-notices")
        self._following[replica.name] = task

    async def add(self, name: str, engine: Engine) -> Replica:
        """Add a replica while others run. It is chosen once it is ready."""
        replica = Replica(name, engine, self._clock)
        replica.is_new = True
        self._replicas.append(replica)
        self._choice.renew(self._replicas)
        await engine.start()
        self._begin_following(replica)
        return replica

    async def remove(self, name: str) -> Replica:
        """Remove a replica that has ended. Raises ``KeyError``: there is none of this name."""
        replica = next((x for x in self._replicas if x.name == name), None)
        if replica is None:
            raise KeyError(name)
        self._replicas.remove(replica)
        self._choice.renew(self._replicas)
        self._earlier += replica.counters
        if (task := self._following.pop(name, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await replica.engine.stop(0.0, 0.0)
        return replica

    async def stop(self, drain_s: float, save_s: float = SAVE_S) -> None:
        self._stopping = True
        await asyncio.gather(*(x.engine.stop(drain_s, save_s) for x in self._replicas))
        tasks, self._following = [*self._following.values(), *self._jobs], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def restart(self, why: str) -> None:
        ready = [x for x in self._replicas if x.takes] or self._replicas
        max(ready, key=lambda x: x.hot_bytes).engine.restart(why)

    # ---- data

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float | None = None
    ) -> AsyncIterator[Upstream]:
        session = session_from(headers)
        key = session or SessionRef("", secrets.token_hex(8), b"")  # no session: any replica

        def candidate(excluded: Welcome | None) -> Candidate:
            replica = self._choice.choose(key, excluded)
            this_process = replica.engine.welcome
            return Candidate(
                replica.name,
                lambda: replica.engine.welcome,
                partial(self._open_at, replica, session, path, headers),
                max(wait_s or 0.0, LEAST_WAIT_S),
                lambda: self._stopping or self.gave_up,
                lambda: any(x.takes_beside(this_process) for x in self._replicas),
                replica.avoid,
            )

        asked, sent = SecondTry(candidate), RequestBody(body)
        del body  # megabytes perhaps, and the answer may take an hour
        try:
            await asked.begin(sent)
            yield asked
        finally:
            await asked.close()

    @asynccontextmanager
    async def _open_at(
        self,
        replica: Replica,
        session: SessionRef | None,
        path: str,
        headers: Mapping[str, str],
        body: RequestBody,
    ) -> AsyncIterator[Upstream]:
        replica.num_running += 1
        try:
            async with replica.engine.open(path, body.content, headers) as upstream:
                body.sent()
                if session is not None and upstream.status < 400:
                    self._served(session, replica)
                yield upstream
        finally:
            replica.num_running -= 1

    def session_headers(self, session: SessionRef) -> dict[str, str]:
        return self._any().engine.session_headers(session)

    def prepare_body(self, body: dict[str, object], session: SessionRef) -> dict[str, object]:
        return self._any().engine.prepare_body(body, session)

    def _any(self) -> Replica:
        for replica in sorted(self._replicas, key=lambda x: not x.takes):
            return replica
        raise EngineUnavailable(self.trouble)

    def _usable(self) -> list[Replica]:
        if found := [x for x in self._replicas if x.takes]:
            return found
        raise EngineUnavailable(self.trouble)

    # ---- control

    async def demote(self, session: SessionRef, tier: TierName | None = None) -> Demoted:
        return await self._choice.holder(session).engine.demote(session, tier)

    async def prefetch(self, session: SessionRef) -> SessionReport | None:
        replica = self._choice.choose(session)
        report = await replica.engine.prefetch(session)
        if report is not None and report.hot:
            self._served(session, replica)
        return report

    async def pin(self, session: SessionRef, pinned: bool) -> SessionReport | None:
        report = await self._choice.holder(session).engine.pin(session, pinned)
        if report is not None:
            self._choice.note_pinned(report)
        return report

    async def forget(self, session: SessionRef) -> SessionReport | None:
        """See ``engines.base.Engine``. Replicas that are away forget it when they are back."""
        there = self._usable()
        self._note_deletion(session)
        self._choice.forget(session)
        reports = await asyncio.gather(*(self._forget_at(x, session) for x in there))
        return next((x for x in reports if x is not None), None)

    def _note_deletion(self, session: SessionRef) -> None:
        full_ones = [x for x in self._replicas if not (x.takes or x.owed.has_room(session.tenant))]
        if full := next((x for x in full_ones if not x.is_new), None):
            raise EngineUnavailable(
                f"replica {full.name} is away, and too many sessions are to be deleted there"
            )
        for replica in full_ones:
            replica.owed.make_room(session.tenant)
        for replica in self._replicas:
            replica.owed.add(session)

    async def _forget_at(self, replica: Replica, session: SessionRef) -> SessionReport | None:
        try:
            report = await replica.engine.forget(session)
        except EngineUnavailable:
            if replica.takes:
                raise
            return None  # it has just ended; it forgets the session when it is back
        replica.owed.discard(session)
        return report

    async def sessions(self) -> list[SessionReport]:
        there = self._usable()
        listed = await asyncio.gather(*(x.engine.sessions() for x in there))
        best: dict[SessionName, tuple[tuple[bool, bool, float], Replica, SessionReport]] = {}
        for replica, reports in zip(there, listed, strict=True):
            for report in reports:
                key = report.tenant, report.id
                if key in replica.owed:
                    continue
                home = self._homes.get(SessionRef(*key, b""))
                rank = home == replica.name, report.hot, -report.idle_s
                if key not in best or rank > best[key][0]:
                    best[key] = rank, replica, report
        for key, (_, replica, report) in best.items():
            self._homes.put(SessionRef(*key, b""), replica.name)
            self._choice.note_pinned(report)
        return [report for _, _, report in best.values()]

    async def stats(self) -> EngineReport:
        there = [x for x in self._replicas if x.takes]
        reports = await asyncio.gather(*(x.figures() for x in there))
        known = [x for x in reports if x is not None]
        if not known:
            raise EngineUnavailable(self.trouble or "no replica gives its figures")
        gone = self._moves + self._earlier
        return joined_report(known, sum((x.counters for x in self._replicas), gone))

    async def adopt(self) -> CodecReport:
        return (await asyncio.gather(*(x.engine.adopt() for x in self._usable())))[0]

    async def measure(self, order: CalibrationOrder | None = None) -> CodecReport:
        """See ``engines.base.Engine``. One replica measures; all adopt what it found."""
        return await self._any().engine.measure(order)

    def notices(self) -> AsyncIterator[Notice | None]:
        return self._notices.read()

    async def _follow(self, replica: Replica) -> None:
        """Pass on a replica's notices of the sessions whose home it is."""
        followed: Welcome | None = None
        while True:
            try:
                async for notice in replica.engine.notices():
                    if notice is None and replica.engine.welcome is followed is not None:
                        self._notices.publish(None)  # the same process: list its sessions again
                    elif notice is None:
                        followed = replica.engine.welcome
                        await self._connected(replica)
                    elif self._is_home(replica, notice.session):
                        self._choice.note_pinned(notice.session)
                        self._notices.publish(notice)
            except Exception:  # top level of this task: other replicas must not suffer
                log.exception("following the notices of replica %s failed", replica.name)
            await asyncio.sleep(FOLLOW_AGAIN_S)

    async def _connected(self, replica: Replica) -> None:
        others = [x.engine.welcome for x in self._replicas if x is not replica and x.takes]
        welcome, other = replica.engine.welcome, next(iter(others), None)
        if welcome is not None:
            replica.is_new = False
            was, replica.differs = replica.differs, ""
            if other is not None:
                replica.differs = difference(other, welcome)
            if replica.differs and replica.differs != was:
                log.error("replica %s is not used: %s", replica.name, replica.differs)
        for session in replica.owed:
            if session.name in replica.owed:  # it has not begun again meanwhile
                with suppress(EngineError):
                    await self._forget_at(replica, session)
        joined = self._joined()
        if other is None or joined != self._welcome:  # else the joint welcome stays as it is
            self._welcome = joined
        self._notices.publish(None)

    def _is_home(self, replica: Replica, report: SessionReport) -> bool:
        session = SessionRef(report.tenant, report.id, b"")
        home = self._homes.get(session)
        if home is None and (report.hot or report.tier is not None):
            self._homes.put(session, replica.name)
            home = replica.name
        return home in (None, replica.name)
