"""The part that one caller sees, and its changes, with one entry for each name that changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import EngineReport, SessionRef, SessionReport
from engines.http import CacheOutcome
from engines.wire import KVSize
from gateway.watch.live import LINGER_S, Live
from gateway.watch.metrics import Metrics
from gateway.watch.scope import ChangeLog, Scope
from scheduler.config import SchedulerConfig
from scheduler.session import Event
from scheduler.sessions import SessionManager
from tests.clock import Clock
from tests.unit.gateway.in_process import WELCOME, RecordingEngine

marks = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)), max_size=30)


@given(marks, st.integers(0, 40))
def test_it_lists_each_name_that_changed_since_once(marks, since):
    log: ChangeLog[str] = ChangeLog()
    moment, latest = 0, {}
    for name, later in marks:
        moment += later
        log.mark(name, moment)
        latest[name] = moment
    assert sorted(log.since(since)) == sorted(x for x, at in latest.items() if at > since)


@given(marks, st.integers(0, 40))
def test_a_bounded_log_never_hides_a_change_that_it_claims_to_know(marks, since):
    log: ChangeLog[str] = ChangeLog(max_entries=3)
    moment, latest = 0, {}
    for name, later in marks:
        moment += later
        log.mark(name, moment)
        latest[name] = moment
    if log.knows(since):
        assert set(log.since(since)) == {x for x, at in latest.items() if at > since}


class Watched:
    """A live view over a table of sessions that the test changes."""

    def __init__(self) -> None:
        self.clock = Clock(1000.0)
        engine = self.engine = RecordingEngine()
        self.sessions = SessionManager(
            engine, SchedulerConfig(), salt_of=lambda name: b"", clock=self.clock
        )
        self.live = Live(engine, self.sessions, Metrics(), clock=self.clock, wall=self.clock)

    def turn(self, id: str, tenant: str = "alice", tokens: int = 10) -> None:
        """A turn from its begin to its end."""
        table = self.sessions.table
        row = table.begin(SessionRef(tenant, id, b""))
        row.known = True
        table.end(row)
        table.take(row, report(tenant, id, tokens))

    def knows_sizes(self) -> None:
        """Have the engine report the size of its KV: 100 bytes a token, 50 of them in bf16."""
        sizes = {"live_kv": KVSize(100), "bf16_kv": KVSize(50)}
        self.engine.welcome = msgspec.structs.replace(WELCOME, **sizes)

    def forget(self, id: str, tenant: str = "alice") -> None:
        row = self.sessions.table.row(tenant, id)
        assert row is not None
        self.sessions.table.take(row, None)

    @contextmanager
    def reader(self, tenant: str | None) -> Iterator[Scope]:
        with self.live.reading(tenant) as scope:
            yield scope


def report(tenant: str, id: str, tokens: int) -> SessionReport:
    return SessionReport(
        tenant=tenant,
        id=id,
        hot=True,
        tier="ram",
        tokens=tokens,
        hot_bytes=tokens * 100,
        cold_bytes=tokens * 20,
        idle_s=0.0,
        pinned=False,
        busy=False,
    )


@pytest.fixture
async def watched() -> Any:
    made = Watched()
    yield made
    await made.live.close()


def snapshot(scope: Scope) -> dict[str, Any]:
    return dict(json.loads(b"".join(scope.snapshot())))


def change(scope: Scope, since: int) -> dict[str, Any]:
    return dict(json.loads(scope.change_since(since)))


async def test_a_tenant_gets_its_own_sessions_only(watched: Watched):
    watched.turn("mine")
    watched.turn("secret", "bob")
    with watched.reader("alice") as scope:
        first = snapshot(scope)
        assert [x["id"] for x in first["sessions"]] == ["mine"]
        assert first["num_sessions"] == 1 and first["memory"]["hot"]["bytes"] == 1000
        assert not first["server"]["admin"]
        moment = scope.moment
        watched.turn("secret", "bob", tokens=99)
        watched.turn("another secret", "bob")
        watched.forget("secret", "bob")
        watched.live.look()
        assert scope.moment == moment, "nothing of it is the tenant's, so no event even begins"
        assert b"secret" not in b"".join(scope.snapshot()) and b"bob" not in scope.change_since(0)


async def test_an_admin_gets_all_sessions_with_their_tenants(watched: Watched):
    watched.turn("s", "alice")
    watched.turn("s", "bob")
    with watched.reader(None) as scope:
        assert {(x["tenant"], x["id"]) for x in snapshot(scope)["sessions"]} == {
            ("alice", "s"),
            ("bob", "s"),
        }
        watched.forget("s", "bob")
        watched.live.look()
        assert change(scope, 0)["gone"] == [{"id": "s", "tenant": "bob"}]


async def test_a_change_holds_only_changed_rows(watched: Watched):
    for i in range(5):
        watched.turn(f"s{i}")
    with watched.reader("alice") as scope:
        watched.live.look()
        moment = scope.moment
        watched.turn("s3", tokens=77)
        watched.live.look()
        changed = change(scope, moment)
        assert [(x["id"], x["tokens"]) for x in changed["sessions"]] == [("s3", 77)]
        assert "server" not in changed and "quality" not in changed and "gone" not in changed
        before = scope.moment
        watched.live.look()
        assert scope.moment == before, "nothing happened, so there is nothing to send"


async def test_a_slow_reader_gets_each_session_once_as_it_is_in_the_end(watched: Watched):
    with watched.reader("alice") as scope:
        moment = scope.moment
        for i in range(50):
            watched.turn("s", tokens=10 + i)
            watched.turn(f"other{i % 3}")
            watched.live.look()
        shown = {x["id"]: x["tokens"] for x in change(scope, moment)["sessions"]}
        assert shown == {"s": 59, "other0": 10, "other1": 10, "other2": 10}


async def test_a_reader_resumes_where_it_was_and_else_begins_anew(watched: Watched):
    with watched.reader("alice") as scope:
        watched.turn("before")
        watched.live.look()
        last = scope.event_id(scope.moment)
    watched.turn("meanwhile")
    watched.clock.now += LINGER_S / 2
    watched.live.look()
    with watched.reader("alice") as scope:
        moment = scope.resumes(last)
        assert moment is not None
        assert [x["id"] for x in change(scope, moment)["sessions"]] == ["meanwhile"]
        for foreign in ("", "x", "1.2.3", "7.1", last + "9999", last.replace(".", ".-")):
            assert scope.resumes(foreign) is None
    with watched.reader("bob") as scope:
        assert scope.resumes(last) is None, "it is another's"
    watched.clock.now += LINGER_S + 1
    watched.live.look()
    with watched.reader("alice") as scope:
        assert scope.resumes(last) is None, "it was not kept for ever"


async def test_a_snapshot_lists_at_most_so_many_and_says_how_many_there_are(watched: Watched):
    for i in range(600):
        watched.turn(str(i))
        watched.clock.now += 0.001
    with watched.reader("alice") as scope:
        first = json.loads(b"".join(scope.snapshot(most=550)))
    assert first["num_sessions"] == 600
    assert [x["id"] for x in first["sessions"]] == [str(i) for i in range(599, 49, -1)]


async def test_sums_follow_every_change(watched: Watched):
    for i in range(4):
        watched.turn(f"s{i}", tokens=10)
    with watched.reader("alice") as scope:
        watched.turn("s1", tokens=30)
        watched.forget("s2")
        watched.live.look()
        memory = snapshot(scope)["memory"]
        assert memory["hot"]["bytes"] == 5000 and memory["cold_bytes"] == 1000
        assert memory["sessions"] == {"idle": 3}


async def test_an_engine_that_serves_without_sleep_is_asked_for_its_figures(watched: Watched):
    asked = []

    async def stats() -> EngineReport:
        asked.append(watched.clock.now)
        return EngineReport(
            hot_bytes=7,
            idle_hot_bytes=0,
            hot_capacity_bytes=100,
            active_bytes=7,
            num_running=0,
            num_waiting=0,
            save_queue_bytes=0,
            tiers=[],
            counters={},
        )

    watched.engine.stats = stats  # type: ignore[method-assign]
    with watched.reader(None) as scope:
        async with asyncio.timeout(30):
            while snapshot(scope)["memory"]["hot"]["bytes"] != 7:
                await scope.beyond(scope.moment)
    assert asked == [1000.0], "fresh figures are not asked for again"


async def test_a_ratio_compares_packed_tokens_with_themselves(watched: Watched):
    """A session grows before its new tokens are packed: those save nothing yet.

    The engine keeps live KV in float32, 100 bytes a token; packed tokens are compared with bf16.
    """
    watched.knows_sizes()
    watched.turn("s", tokens=100)  # 5,000 bytes in bf16, 2,000 packed
    row = watched.sessions.table.row("alice", "s")
    assert row is not None
    grown = msgspec.structs.replace(
        report("alice", "s", 330), cold_bytes=2000, cold_tokens=100, busy=True
    )
    watched.sessions.table.learn(row, grown)
    with watched.reader(None) as scope:
        sent = snapshot(scope)
        (shown,) = sent["sessions"]
        assert (shown["tokens"], shown["bf16_bytes"], shown["ratio"]) == (330, 16_500, 2.5)
        memory = sent["memory"]
        assert (memory["cold_bytes"], memory["bf16_bytes"]) == (2000, 5_000)


async def test_a_snapshot_in_pages_lists_each_session_once(watched: Watched):
    for i in range(130):
        watched.clock.now += 1
        watched.turn(f"s{i}")
    with watched.reader("alice") as scope:
        events = [(name, json.loads(b"".join(data))) for name, data in scope.paged(50)]
        assert [name for name, _ in events] == ["snapshot", "more", "more"]
        assert [x.get("left") for _, x in events] == [None, 80 - 50, 0]
        assert events[0][1]["num_sessions"] == 130
        listed = [row["id"] for _, data in events for row in data["sessions"]]
        assert listed == [f"s{i}" for i in reversed(range(130))]
        assert [name for name, _ in scope.paged(500)] == ["snapshot"]


async def test_a_session_is_listed_with_its_first_answer_while_that_comes(watched: Watched):
    watched.knows_sizes()
    ref = SessionRef("alice", "new", b"")
    with watched.reader("alice") as scope, watched.live.request(ref, "r", "chat", "codex") as it:
        watched.live.look()
        assert "sessions" not in change(scope, 0), "it waits, and has no row yet"
        row = watched.sessions.table.begin(ref)
        it.admitted()
        it.cache, it.reported_prompt_tokens = CacheOutcome("miss", 0, "never-stored"), 90
        for _ in range(2):
            watched.clock.now += 1.0
            it.took(b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n' * 5)
            watched.live.look()
        (shown,) = change(scope, scope.moment - 1)["sessions"]
        seen = {name: shown[name] for name in ("tokens", "bytes", "bf16_bytes", "client", "turns")}
        assert seen["tokens"] >= 96
        size = {"bytes": seen["tokens"] * 100, "bf16_bytes": seen["tokens"] * 50}
        assert seen == {"tokens": seen["tokens"], **size, "client": "codex", "turns": 1}
        assert (shown["last_source"], shown["last_reason"]) == ("miss", "never-stored")
        assert shown["idle_since"] is None
        assert snapshot(scope)["memory"]["hot"]["bytes"] == size["bytes"]
        row.known = True
        watched.sessions.table.end(row)
    assert watched.live.detail(ref, admin=False).row.turns == 1  # type: ignore[union-attr]


async def test_a_snapshot_has_the_last_hour_and_a_change_the_moves_since(watched: Watched):
    watched.knows_sizes()
    ref = SessionRef("alice", "s", b"")
    with watched.live.request(ref, "r", "chat", "curl") as it:
        row = watched.sessions.table.begin(ref)
        it.admitted()
        it.cache, it.reported_prompt_tokens = CacheOutcome("miss", 0, "never-stored"), 400
        watched.clock.now += 20.0
        it.took(b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n')
        row.known, row.tokens = True, 401
        watched.sessions.table.end(row)
    watched.clock.now += 15.0  # no reader has come so far
    watched.turn("secret", "bob")
    with watched.reader("alice") as scope:
        sent = snapshot(scope)
        assert sent["hour"]["since"] == 1000.0 and sent["hour"]["step_s"] == 10
        assert sent["hour"]["prompt_tokens_per_s"] == [20.0, 20.0, 0.0]
        (began,) = sent["moves"]
        assert (began["id"], began["before"], began["after"]) == ("s", "", "hot")
        assert (began["tokens"], began["bytes"]) == (401, 40_100) and "tenant" not in began
        row.learn(report("alice", "s", 401))
        row.apply(Event.HIBERNATE)
        row.apply(Event.EVICTED, "asked")
        watched.live.look()
        (moved,) = change(scope, 0)["moves"]
        assert (moved["before"], moved["after"], moved["why"]) == ("hot", "ram", "asked")
        assert (moved["bytes"], moved["bf16_bytes"]) == (401 * 20, 401 * 50)
        assert moved["number"] > began["number"]
        assert "moves" not in change(scope, scope.moment)
    with watched.reader(None) as scope:
        tenants = [x["tenant"] for x in snapshot(scope)["moves"]]
        assert tenants == ["alice", "bob", "alice"]
    watched.clock.now += 3600.0
    with watched.reader("alice") as scope:
        sent = snapshot(scope)
        assert sent["moves"] == [] and not any(sent["hour"]["prompt_tokens_per_s"])


async def test_a_session_that_the_engine_refused_has_moved_nowhere(watched: Watched):
    row = watched.sessions.table.begin(SessionRef("alice", "refused", b""))
    watched.sessions.table.end(row)
    with watched.reader("alice") as scope:
        assert snapshot(scope)["moves"] == []


async def test_a_title_is_shown_to_its_tenant_and_goes_with_its_session(watched: Watched):
    ref = SessionRef("alice", "s", b"")
    with watched.reader("alice") as mine, watched.reader("bob") as his:
        with watched.live.request(ref, "r", "chat", "curl") as it:
            it.title = "my secret plan"
            row = watched.sessions.table.begin(ref)
            it.admitted()
            row.known = True
            assert snapshot(mine)["sessions"][0]["title"] == "my secret plan"
            watched.sessions.table.end(row)
            assert "secret" not in str(it.attributes())
        assert snapshot(mine)["sessions"][0]["title"] == "my secret plan"
        assert b"secret" not in b"".join(his.snapshot())
        watched.forget("s")
        watched.turn("s")
        assert "title" not in snapshot(mine)["sessions"][0]
