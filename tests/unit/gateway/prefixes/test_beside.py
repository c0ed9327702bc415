"""A request of an agent beside its conversation does not take the conversation's row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.prefixes.beside import Row, row_of
from gateway.prefixes.outline import Outline, outline_of
from tests.unit.gateway.in_process import MODEL, Answered, App, RecordingEngine

SALT = b"s" * 32


def chat(system: str | None, *texts: str) -> dict[str, Any]:
    first = [{"role": "system", "content": system}] if system else []
    return {"model": "m", "messages": first + [{"role": "user", "content": x} for x in texts]}


MAIN = chat("you code", "fix it " * 200)
LATER = chat("you code", "fix it " * 200, "thanks", "more")
SWITCHED = chat("you plan", "fix it " * 200, "thanks")
COMPACTED = chat("you code", "a summary")
TITLE = chat("you name things", "title: fix it")
TITLE_2 = chat("you name things", "title: something else")
PROBE = chat(None, "quota")
ANEW = chat(None, "another task " * 200)


class Rows:
    """The two rows of the session "s", which take requests one after the other."""

    def __init__(self) -> None:
        self.held: dict[str, Outline] = {}
        self.busy: set[str] = set()

    def take(self, body: dict[str, Any]) -> Row:
        now = outline_of(body, SALT)
        row = row_of("s", now, self.held.get, lambda id: id not in self.busy)
        self.held[row.id] = now
        return row


MINE, LESSER = Row("s"), Row("s/beside", True)


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        ([MAIN, LATER], [MINE, MINE]),
        ([MAIN, TITLE, LATER, TITLE_2, LATER], [MINE, LESSER, MINE, LESSER, MINE]),
        ([TITLE, MAIN, LATER, TITLE], [MINE, MINE, MINE, LESSER]),
        ([MAIN, TITLE, PROBE, LATER], [MINE, LESSER, LESSER, MINE]),
        ([MAIN, SWITCHED, LATER], [MINE, MINE, MINE]),
        ([LATER, COMPACTED, TITLE], [MINE, MINE, MINE]),  # nothing of it is large any more
        ([MAIN, ANEW, MAIN], [MINE, MINE, MINE]),
    ],
)
def test_rows(asked: list[dict[str, Any]], rows: list[Row]) -> None:
    session = Rows()
    assert [session.take(body) for body in asked] == rows


def test_a_conversation_that_comes_while_its_title_is_made_keeps_a_row_of_its_own() -> None:
    session = Rows()
    session.take(TITLE)
    session.busy.add("s")
    assert session.take(MAIN) == Row("s/beside")
    session.busy.clear()
    assert session.take(LATER) == Row("s/beside")
    assert session.take(TITLE_2) == Row("s", True)
    assert session.take(PROBE) == Row("s", True)


async def asked_as(app: App, body: dict[str, Any], **headers: str) -> str:
    reply = await app.post("/v1/chat/completions", {**body, "model": MODEL}, **headers)
    assert reply.status == 200, reply.body
    return reply.headers["x-thermocline-session"]


async def test_a_title_is_asked_beside_and_goes_with_its_session() -> None:
    app = App()
    agent = {"x_session_affinity": "o"}
    assert [await asked_as(app, x, **agent) for x in (MAIN, TITLE, LATER)] == ["o", "o/beside", "o"]
    shown = {x["id"]: x for x in (await app.get("/v1/sessions")).json["data"]}
    assert (shown["o/beside"]["kind"], shown["o/beside"]["parent"]) == ("child", "o")
    assert shown["o"]["kind"] == "main"
    assert (await app.call("DELETE", "/v1/sessions/o", b"", {})).status == 200
    assert (await app.get("/v1/sessions")).json["data"] == []


async def test_an_id_that_a_user_chose_is_obeyed() -> None:
    app = App()
    for body in (MAIN, TITLE):
        assert await asked_as(app, body, x_session_id="mine", x_session_affinity="o") == "mine"


async def test_a_key_without_room_for_another_session_is_served_all_the_same() -> None:
    app = App(sessions_per_tenant=1)
    for body in (MAIN, TITLE):
        assert await asked_as(app, body, session_id="", x_session_affinity="o") == "o"


async def test_both_at_once() -> None:
    going_on = asyncio.Event()

    class Slow(Answered):
        async def chunks(self) -> AsyncIterator[bytes]:
            await going_on.wait()
            async for chunk in super().chunks():
                yield chunk

    app = App(RecordingEngine(Slow(200, {"content-type": "application/json"}, b"{}")))
    first = asyncio.create_task(asked_as(app, TITLE, x_session_affinity="o"))
    while not app.engine.asked:
        await asyncio.sleep(0)
    second = asyncio.create_task(asked_as(app, MAIN, x_session_affinity="o"))
    going_on.set()
    assert [await first, await second] == ["o", "o/beside"]
