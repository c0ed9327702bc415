"""``demote`` of a session that the engine has yet to save."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from engines.base import Demoted, SessionRef, TierName
from scheduler.config import SchedulerConfig
from tests.reports import session_report
from tests.unit.gateway.in_process import App, RecordingEngine, chat_answer


@dataclass
class SavingEngine(RecordingEngine):
    """Has one session, ``s``, which it drops once it is saved."""

    is_saved: bool = False

    async def demote(self, session: SessionRef, tier: TierName | None = None) -> Demoted:
        if self.is_saved:
            return Demoted(session_report(session.tenant, session.id, hot=False, hot_bytes=0), None)
        unsaved = session_report(session.tenant, session.id, tier=None, cold_bytes=0)
        return Demoted(unsaved, "saving")


async def test_a_session_that_is_still_being_saved_sleeps_when_it_is() -> None:
    engine = SavingEngine(answer=chat_answer())
    app = App(engine)
    assert (await app.chat(session_id="s")).status == 200
    reply = await app.post("/v1/sessions/s/demote", {})
    assert (reply.status, reply.json["state"]) == (202, "saving")
    again = await app.post("/v1/sessions/s/demote", {})
    assert (again.status, again.json["state"]) == (202, "saving")
    assert (await app.get("/v1/sessions/s")).json["state"] == "saving"
    engine.is_saved = True
    async with asyncio.timeout(60):
        while (shown := (await app.get("/v1/sessions/s")).json)["state"] != "cold":
            await asyncio.sleep(0.05)
    assert shown["tier"] == "ram"
    assert (await app.post("/v1/sessions/s/demote", {})).status == 200


@dataclass
class PatientEngine(SavingEngine):
    """Says at once that a session is being saved, and waits with it when it is asked again."""

    demoted: list[str] = field(default_factory=list)

    async def demote(self, session: SessionRef, tier: TierName | None = None) -> Demoted:
        self.demoted.append(session.id)
        if self.demoted.count(session.id) > 1:
            await asyncio.Event().wait()
        return await super().demote(session, tier)


async def test_a_saved_session_sleeps_while_others_are_being_saved() -> None:
    app = App(engine := PatientEngine(answer=chat_answer()))
    saving = [f"s{i}" for i in range(8)]
    for name in saving:
        assert (await app.chat(session_id=name)).status == 200
        assert (await app.post(f"/v1/sessions/{name}/demote", {})).status == 202
    async with asyncio.timeout(60):
        while len(engine.demoted) < len(saving) + SchedulerConfig().max_hibernations:
            await asyncio.sleep(0.05)
        assert (await app.chat(session_id="ready")).status == 200
        engine.is_saved = True
        assert (await app.post("/v1/sessions/ready/demote", {})).status == 200
