"""What one caller sees at a moment, made at most once a second."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from engines.base import EngineReport, SessionRef, SessionReport
from engines.http import CacheOutcome
from engines.wire import KVSize
from gateway.watch.live import Live
from gateway.watch.metrics import Metrics
from gateway.watch.requests import LiveRequest
from gateway.watch.snapshots import LINGER_S, MAX_ROWS, Made, Snapshots
from gateway.watch.tally import MAX_TENANTS as MAX_TALLIES
from scheduler.config import SchedulerConfig
from scheduler.session import Event, Session
from scheduler.sessions import SessionManager
from tests.clock import Clock
from tests.reports import engine_report, session_report
from tests.unit.gateway.in_process import WELCOME, RecordingEngine
from tests.unit.gateway.watch.streamed import WORD, answered, said


class Watched:
    """A live view over a table of sessions that the test changes."""

    def __init__(self) -> None:
        self.clock = Clock(1000.0)
        engine = self.engine = RecordingEngine()
        self.sessions = SessionManager(
            engine, SchedulerConfig(), salt_of=lambda name: b"", clock=self.clock
        )
        self.metrics = Metrics()
        self.live = Live(engine, self.sessions, self.metrics, clock=self.clock, wall=self.clock)
        self.snapshots = Snapshots(self.live)

    def turn(self, id: str, tenant: str = "alice", tokens: int = 10) -> None:
        """A turn from its begin to its end."""
        table = self.sessions.table
        row = table.begin(SessionRef(tenant, id, b""))
        row.known = True
        table.end(row)
        table.take(row, report(tenant, id, tokens))

    @contextmanager
    def answering(
        self, tenant: str, cache: CacheOutcome, prompt_tokens: int
    ) -> Iterator[tuple[LiveRequest, Session]]:
        """A turn of the session ``s`` that is being answered, from its begin to its end."""
        ref = SessionRef(tenant, "s", b"")
        with self.live.request(ref, "r", "chat", "curl") as it:
            row = self.sessions.table.begin(ref)
            it.admitted()
            answered(it, cache, prompt_tokens)
            row.known = True
            yield it, row
            self.sessions.table.end(row)

    def knows_sizes(self) -> None:
        """Have the engine report the size of its KV: 100 bytes a token, 50 of them in bf16."""
        sizes = {"live_kv": KVSize(100), "bf16_kv": KVSize(50)}
        self.engine.welcome = msgspec.structs.replace(WELCOME, **sizes)

    def forget(self, id: str, tenant: str = "alice") -> None:
        row = self.sessions.table.row(tenant, id)
        assert row is not None
        self.sessions.table.take(row, None)

    async def made(self, tenant: str | None, most: int = MAX_ROWS) -> Made:
        """The snapshot that a reader gets a second after the last one."""
        self.clock.now += 1.0
        return await self.snapshots.get(tenant, most)

    async def seen(self, tenant: str | None, most: int = MAX_ROWS) -> dict[str, Any]:
        return dict(json.loads((await self.made(tenant, most)).body))


def report(tenant: str, id: str, tokens: int) -> SessionReport:
    sizes = {"hot_bytes": tokens * 100, "cold_bytes": tokens * 20}
    return session_report(tenant, id, tokens=tokens, **sizes)


@pytest.fixture
def watched() -> Watched:
    return Watched()


async def test_a_tenant_gets_its_own_sessions_only(watched: Watched):
    watched.turn("mine")
    watched.turn("secret", "bob")
    first = await watched.seen("alice")
    assert [x["id"] for x in first["sessions"]] == ["mine"]
    assert first["num_sessions"] == 1 and first["memory"]["hot"]["bytes"] == 1000
    assert not first["server"]["admin"]
    before = await watched.made("alice")
    watched.turn("secret", "bob", tokens=99)
    watched.turn("another secret", "bob")
    watched.forget("secret", "bob")
    after = await watched.made("alice")
    assert after.tag == before.tag, "nothing of it is the tenant's"
    assert b"secret" not in after.body and b"bob" not in after.body


async def test_an_admin_gets_all_sessions_with_their_tenants(watched: Watched):
    watched.turn("s", "alice")
    watched.turn("s", "bob")
    shown = (await watched.seen(None))["sessions"]
    assert {(x["tenant"], x["id"]) for x in shown} == {("alice", "s"), ("bob", "s")}
    watched.forget("s", "bob")
    assert [x["tenant"] for x in (await watched.seen(None))["sessions"]] == ["alice"]


async def test_who_asks_for_fewer_rows_has_no_snapshot_of_its_own(watched: Watched):
    for number in range(30):
        watched.turn(f"s{number}")
        watched.clock.now += 0.001
    whole = await watched.made("alice", 500)
    ids = [x["id"] for x in json.loads(whole.body)["sessions"]]
    assert ids == [f"s{number}" for number in range(29, -1, -1)]
    looks = []
    look = watched.snapshots._make

    async def counted(*of: Any) -> Any:
        looks.append(of)
        return await look(*of)

    watched.snapshots._make = counted  # type: ignore[method-assign]
    tags = set()
    for most in range(1, 31):
        made = await watched.snapshots.get("alice", most)
        shown = json.loads(made.body)
        assert shown["sessions"] == json.loads(whole.body)["sessions"][:most]
        assert shown["num_sessions"] == 30
        tags.add(made.tag)
    assert not looks and len(tags) == 30 and whole.tag in tags


async def test_all_readers_of_a_second_get_the_same(watched: Watched):
    watched.turn("s")
    first = await watched.made("alice")
    watched.turn("s", tokens=77)
    for _ in range(3):
        assert (await watched.snapshots.get("alice", MAX_ROWS)).body is first.body
    other = await watched.made("alice")
    assert other.tag != first.tag and json.loads(other.body)["sessions"][0]["tokens"] == 77


async def test_what_takes_long_to_make_is_made_less_often(watched: Watched):
    made, rows = [], watched.live.rows

    def slow(tenant: str | None) -> Any:
        made.append(watched.clock.now)
        watched.clock.now += 0.5
        return rows(tenant)

    watched.live.rows = slow  # type: ignore[method-assign]
    for _ in range(40):
        await watched.made("alice")
    assert [int(b - a) for a, b in zip(made, made[1:], strict=False)][:2] == [10, 10]


async def test_a_snapshot_without_readers_is_kept_for_a_while_only(watched: Watched):
    await watched.made("alice")
    assert len(watched.snapshots._made) == 1
    watched.clock.now += LINGER_S + 1
    await watched.made("bob")
    assert [x for x, _ in watched.snapshots._made] == ["bob"]


async def test_sums_follow_every_change(watched: Watched):
    for i in range(4):
        watched.turn(f"s{i}", tokens=10)
    await watched.seen("alice")
    watched.turn("s1", tokens=30)
    watched.forget("s2")
    memory = (await watched.seen("alice"))["memory"]
    assert memory["hot"]["bytes"] == 5000 and memory["cold_bytes"] == 1000
    assert memory["sessions"] == {"idle": 3}


async def test_an_engine_that_serves_without_sleep_is_asked_for_its_figures(watched: Watched):
    asked = []

    async def stats() -> EngineReport:
        asked.append(watched.clock.now)
        return engine_report(7, 100)

    watched.engine.stats = stats  # type: ignore[method-assign]
    for _ in range(2):
        assert (await watched.seen(None))["memory"]["hot"]["bytes"] == 7
    assert asked == [1001.0], "fresh figures are not asked for again"


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
    sent = await watched.seen(None)
    (shown,) = sent["sessions"]
    assert (shown["tokens"], shown["bf16_bytes"], shown["ratio"]) == (330, 16_500, 2.5)
    memory = sent["memory"]
    assert (memory["cold_bytes"], memory["bf16_bytes"]) == (2000, 5_000)
    # What is stored exactly, in float32, takes twice the room of bf16: that is no density.
    exact = msgspec.structs.replace(report("alice", "s", 100), cold_bytes=10_000, cold_tokens=100)
    watched.sessions.table.learn(row, exact)
    assert (await watched.seen(None))["sessions"][0]["ratio"] is None


async def test_a_session_is_listed_with_its_first_answer_while_that_comes(watched: Watched):
    watched.knows_sizes()
    ref = SessionRef("alice", "new", b"")
    with watched.live.request(ref, "r", "chat", "codex") as it:
        assert (await watched.seen("alice"))["sessions"] == [], "it waits, and has no row yet"
        row = watched.sessions.table.begin(ref)
        it.admitted()
        answered(it, CacheOutcome("miss", 0, "never-stored"), 90)
        for _ in range(2):
            watched.clock.now += 1.0
            said(it, WORD * 5)
        sent = await watched.seen("alice")
        (shown,) = sent["sessions"]
        seen = {name: shown[name] for name in ("tokens", "bytes", "bf16_bytes", "client", "turns")}
        assert seen["tokens"] >= 96
        size = {"bytes": seen["tokens"] * 100, "bf16_bytes": seen["tokens"] * 50}
        assert seen == {"tokens": seen["tokens"], **size, "client": "codex", "turns": 1}
        assert (shown["last_source"], shown["last_reason"]) == ("first", "never-stored")
        assert shown["idle_since"] is None
        assert sent["memory"]["hot"]["bytes"] == size["bytes"]
        row.known = True
        watched.sessions.table.end(row)
    assert watched.snapshots.detail(ref).row.turns == 1  # type: ignore[union-attr]


async def test_a_snapshot_has_the_last_hour_and_its_moves(watched: Watched):
    watched.knows_sizes()
    with watched.answering("alice", CacheOutcome("miss", 0, "never-stored"), 400) as (it, row):
        watched.clock.now += 20.0
        said(it)
        row.tokens = 401
    watched.clock.now += 15.0  # no reader has come so far
    watched.turn("secret", "bob")
    sent = await watched.seen("alice")
    assert sent["hour"]["since"] == 1000.0 and sent["hour"]["step_s"] == 10
    assert sent["hour"]["prompt_tokens_per_s"] == [20.0, 20.0, 0.0]
    (began,) = sent["moves"]
    assert (began["id"], began["before"], began["after"]) == ("s", "", "hot")
    assert (began["tokens"], began["bytes"]) == (401, 40_100) and "tenant" not in began
    row.learn(report("alice", "s", 401))
    row.apply(Event.HIBERNATE)
    row.apply(Event.EVICTED, "asked")
    _, moved = (await watched.seen("alice"))["moves"]
    assert (moved["before"], moved["after"], moved["why"]) == ("hot", "ram", "asked")
    assert (moved["bytes"], moved["bf16_bytes"]) == (401 * 20, 401 * 50)
    assert moved["number"] > began["number"]
    tenants = [x["tenant"] for x in (await watched.seen(None))["moves"]]
    assert tenants == ["alice", "bob", "alice"]
    watched.clock.now += 3600.0
    sent = await watched.seen("alice")
    assert sent["moves"] == [] and not any(sent["hour"]["prompt_tokens_per_s"])


async def test_until_the_speed_of_prefill_is_known_tokens_are_shown_only(watched: Watched):
    for cached in (0, 300):
        with watched.answering("alice", CacheOutcome("hot", cached, None), 310):
            pass
    sent = await watched.seen("alice")
    now, (shown,) = sent["now"], sent["sessions"]
    assert (now["saved_s_today"], now["saved_tokens_today"]) == (None, 300)
    assert (shown["saved_s"], shown["saved_tokens"]) == (None, 300)


async def test_a_session_that_the_engine_refused_has_moved_nowhere(watched: Watched):
    row = watched.sessions.table.begin(SessionRef("alice", "refused", b""))
    watched.sessions.table.end(row)
    assert (await watched.seen("alice"))["moves"] == []


def streamed(watched: Watched, tenant: str, cache: CacheOutcome, first_s: float) -> None:
    """One turn of a stream with 100 tokens of prompt, whose first token came after ``first_s``."""
    with watched.answering(tenant, cache, 100) as (it, _):
        watched.clock.now += first_s
        said(it)


async def test_first_tokens_of_returns_are_shown_beside_those_of_first_turns(watched: Watched):
    assert (await watched.seen("alice"))["now"]["first_token"] == {}
    for first_s in (2.0, 3.0, 4.0):
        streamed(watched, "alice", CacheOutcome("miss", 0, "never-stored"), first_s)
    for number in range(20):
        source = "cold-disk" if number % 2 else "cold-ram"
        streamed(watched, "alice", CacheOutcome(source, 90), 0.25 if number < 19 else 1.0)  # type: ignore[arg-type]
    streamed(watched, "alice", CacheOutcome("miss", 0, "evicted"), 5.0)
    streamed(watched, "bob", CacheOutcome("miss", 0, "never-stored"), 2.0)
    streamed(watched, "bob", CacheOutcome("hot", 90), 0.125)
    shown = (await watched.seen("alice"))["now"]["first_token"]
    assert shown == {
        "first": {"turns": 3, "p50_s": 3.0, "p95_s": 4.0, "prompt_tokens": 100},
        "restored": {"turns": 20, "p50_s": 0.25, "p95_s": 1.0, "prompt_tokens": 100},
        "missed": {"turns": 1, "p50_s": 5.0, "p95_s": 5.0, "prompt_tokens": 100},
    }
    assert (await watched.seen(None))["now"]["first_token"]["hot"]["turns"] == 1


@pytest.mark.parametrize(
    ("outcome", "source"),
    [
        (CacheOutcome("hot", 40, "diverged"), "first"),
        (CacheOutcome("cold-ram", 64), "first"),
        (CacheOutcome("miss", 0, "disabled"), "first"),
        (CacheOutcome("miss", 0, "evicted"), "miss"),  # the engine remembers it
        (CacheOutcome("cold-redis", 64), "cold-redis"),  # it may be another server's
    ],
)
async def test_a_first_turn_that_shares_a_beginning_is_no_return(watched, outcome, source):
    streamed(watched, "alice", outcome, 1.0)
    seen = await watched.seen("alice")
    assert seen["sessions"][0]["last_source"] == source
    assert seen["memory"]["outcomes"] == {source: {outcome.reason or "": 1}}
    assert list(seen["now"]["first_token"]) == [
        {"first": "first", "miss": "missed", "cold-redis": "restored"}[source]
    ]
    counted = f'cache="{source}"'
    assert counted in watched.metrics.render().decode()
    streamed(watched, "alice", CacheOutcome("hot", 90), 1.0)
    assert (await watched.seen("alice"))["memory"]["outcomes"]["hot"] == {"": 1}


async def test_an_admin_sees_what_each_tenant_has_and_uses_and_no_one_else_does(watched: Watched):
    watched.turn("s", "alice")
    watched.turn("s2", "alice", tokens=20)
    watched.turn("s", "bob")
    for tenant, turns in (("alice", 3), ("bob", 1)):
        for _ in range(turns):
            streamed(watched, tenant, CacheOutcome("miss", 0, "never-stored"), 1.0)
    with watched.live.request(SessionRef("carol", "c", b""), "r", "chat", "curl"):
        alice, bob, carol = (await watched.seen(None))["tenants"]
        assert (alice["name"], alice["sessions"], alice["hot_bytes"]) == ("alice", 2, 3000)
        assert alice["cold_bytes"] == 600 and alice["wait_p95_s"] == 0.0
        assert (alice["tokens_last_hour"], alice["share"]) == (303, 0.75)
        assert (bob["tokens_last_hour"], bob["share"]) == (101, 0.25)
        assert (carol["waiting"], carol["running"], carol["wait_p95_s"]) == (1, 0, None)
        assert (await watched.seen("alice"))["tenants"] == []
    watched.clock.now += 2 * 3600.0
    names = [x["name"] for x in (await watched.seen(None))["tenants"]]
    assert names == ["alice", "bob"], "they still have sessions"


async def test_sums_stay_while_an_admin_looks_at_more_tenants_than_have_any(watched: Watched):
    first = CacheOutcome("miss", 0, "never-stored")
    for i in range(MAX_TALLIES + 1):
        watched.turn("s", f"quiet/{i}")
    for i in range(MAX_TALLIES + 1):
        streamed(watched, "alice" if i % 9 == 0 else f"ui/{i}", first, 0.5)
    for _ in range(2):
        tenants = {x["name"]: x for x in (await watched.seen(None))["tenants"]}
        assert tenants["alice"]["tokens_last_hour"] > 0


async def test_while_the_engine_is_away_nothing_of_its_memory_is_shown_as_there():
    watched = Watched()
    watched.turn("s")
    before = await watched.seen("alice")
    assert before["sessions"][0]["state"] == "idle" and before["memory"]["hot"]["bytes"] == 1000
    watched.engine.welcome = None
    after = await watched.seen("alice")
    assert (after["sessions"][0]["state"], after["sessions"][0]["tier"]) == ("away", None)
    assert after["memory"]["sessions"] == {"away": 1}
    assert after["memory"]["hot"]["bytes"] == after["memory"]["cold_bytes"] == 0
