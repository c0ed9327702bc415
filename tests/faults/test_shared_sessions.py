"""Sessions of several servers: rows by the page, deletions, no Redis, hostile values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import redis as redis_py

from engines.base import EngineUnavailable, Notice
from engines.wire import absent
from gateway.shared.deletions import KEPT_S
from gateway.shared.redis_client import AWAY_S
from gateway.shared.session_rows import SessionRow, writing
from kvstore.errors import TierUnavailable
from tests.redis_server import RedisCluster, RedisServer
from tests.shared_rig import OneServer
from tests.unit.scheduler.conftest import Held
from tests.waiting import eventually

pytestmark = pytest.mark.redis
Make = Callable[..., Awaitable[OneServer]]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def client(redis: RedisServer) -> Iterator[redis_py.Redis]:
    with redis_py.Redis.from_url(redis.url) as client:
        client.flushall()
        yield client


@pytest.fixture
async def make(redis: RedisServer, client: redis_py.Redis) -> AsyncIterator[Make]:
    made: list[OneServer] = []

    async def make(url: str = redis.url, **secret: bytes) -> OneServer:
        made.append(OneServer(url, **secret))
        await made[-1].start()
        return made[-1]

    yield make
    for server in made:
        await server.stop()


async def both(make: Make, *sessions: str) -> tuple[OneServer, OneServer]:
    """Two servers, each of which has served these sessions."""
    a, b = await make(), await make()
    for server in (a, b):
        for id in sessions:
            await server.turn(id)
    return a, b


async def test_any_server_lists_the_sessions_of_all_by_last_use(make: Make):
    a, b = await make(), await make()
    for server, id in ((a, "one"), (b, "two"), (a, "three")):
        await server.turn(id)
    assert await a.listed() == await b.listed() == ["three", "two", "one"]
    await b.turn("one")
    assert await a.listed() == ["one", "three", "two"]
    assert await a.listed("bob") == []
    (row,) = (await a.shared.elsewhere("alice", "two")).rows
    shown = a.shared.shown(row)
    assert (shown["id"], shown["model"], shown["elsewhere"]) == ("two", "m", True)


async def test_pages_go_on_from_each_other(make: Make):
    a = await make()
    names = a.shared.deletions._names.of("alice")
    rows = [SessionRow("m", f"s{i}", 1.0, 1e9 + i, "redis", 10, 20) for i in range(25)]
    await a.redis.run([y for x in rows for y in writing(names, x)])
    found, below = [], None
    for expected in (10, 10, 5):
        page = await a.shared.page("alice", 10, below)
        assert page is not None
        assert len(page.rows) == expected
        found += [x.id for x in page.rows]
        below = page.next
    assert found == [f"s{i}" for i in reversed(range(25))]
    assert below is None
    none = await a.shared.page("alice", 0, None)  # a list that others fill, and that goes on here
    assert none is not None
    assert none.rows == []
    assert none.next is not None
    page = await a.shared.page("alice", 1, none.next)
    assert page is not None
    assert [x.id for x in page.rows] == ["s24"]


async def test_a_row_that_expired_leaves_the_list(make: Make, client: redis_py.Redis):
    a = await make()
    await a.turn("one")
    await a.turn("two")
    (key, *_) = client.keys("*:row:*")
    client.delete(key)
    assert len(await a.listed()) == 1
    (index,) = client.keys("*:index")
    assert client.zcard(index) == 1
    assert all(0 < client.ttl(x) <= KEPT_S for x in client.keys("thermocline:sessions:*"))


@pytest.mark.parametrize("by_s", [0, 86_400, -86_400])
async def test_a_deletion_removes_what_began_before_it_and_nothing_after(make: Make, by_s: int):
    """Also while the clock of Redis jumps."""
    a, b = await both(make, "gone", "stays")
    for server in (a, b):
        server.redis.by_s = by_s
    assert await a.delete("gone")
    await eventually(lambda: b.own() == ["stays"])
    await b.shared.deletions.removed()
    assert ("alice", "gone") not in b.engine.held
    assert await a.listed() == await b.listed() == ["stays"]
    await b.turn("gone")
    await asyncio.sleep(0.2)
    assert b.own() == ["gone", "stays"]
    assert sorted(await a.listed()) == ["gone", "stays"]


async def test_a_write_that_was_on_its_way_does_not_undo_a_deletion(make: Make):
    a, b = await make(), await make()
    await b.turn("gone")
    heard = b.shared.deletions.receive
    b.shared.deletions.receive = lambda raw: None  # type: ignore[method-assign]  # it is lost
    assert await a.delete("gone")
    await b.turn("gone")  # of the same session, since b has not heard
    assert await a.listed() == []
    await eventually(lambda: b.own() == [])
    b.shared.deletions.receive = heard  # type: ignore[method-assign]


async def test_a_server_that_was_away_forgets_before_it_lists(make: Make):
    a = await make()
    await a.turn("gone")
    await a.delete("gone")
    late = await make()
    late.engine.held = {("alice", "gone"): Held(hot=False), ("alice", "stays"): Held(hot=False)}
    await late.sessions.follower.ask()
    assert late.own() == ["stays"]
    assert list(late.engine.held) == [("alice", "stays")]


async def test_a_session_that_began_after_a_deletion_is_kept_by_the_next_life(make: Make):
    a, b = await make(), await make()
    await a.turn("again")
    await b.delete("again")
    await eventually(lambda: a.own() == [])
    await a.turn("again")
    life2 = await make()
    life2.engine.held = {("alice", "again"): Held(hot=False)}
    await life2.sessions.follower.ask()
    assert life2.own() == ["again"]


async def test_what_a_dead_server_saved_late_is_forgotten_before_the_first_turn(make: Make):
    """The engine of ``b`` stands for the common tier, to which a dead server's save came late."""
    a, b = await make(), await make()
    await a.turn("gone")
    await a.delete("gone")
    b.engine.held["alice", "gone"] = Held(hot=False, tier="redis")
    await b.shared.before_first_turn(b.model, b.ref("gone"))
    assert b.engine.held == {}
    await b.turn("gone")
    await a.shared.before_first_turn(a.model, a.ref("gone"))
    a.engine.held["alice", "gone"] = Held(hot=False, tier="redis")
    await a.shared.before_first_turn(a.model, a.ref("gone"))
    assert list(a.engine.held) == [("alice", "gone")]  # it is a new session


async def test_an_engine_that_was_away_forgets_when_it_is_back(make: Make):
    a, b = await both(make, "gone")
    b.engine.down = True
    await a.delete("gone")
    await eventually(lambda: b.own() == [])  # it is not listed while it is still to be removed
    b.engine.down = False
    await b.sessions.follower.ask()
    await b.shared.deletions.removed()
    assert b.own() == []
    assert b.engine.held == {}


async def test_a_split_network_is_made_up_for(make: Make, redis: RedisServer):
    """One server deletes while Redis is away, the other one goes on; Redis comes back empty."""
    a, b = await both(make, "gone", "stays")
    redis.kill()
    await a.hears(False)
    await b.hears(False)
    assert not await a.delete("gone")
    with pytest.raises(TierUnavailable):
        await b.turn("gone")
    assert (await a.shared.elsewhere("alice", "unknown")).is_away
    assert await a.shared.page("alice", 10, None) is None
    assert a.own() == ["stays"]
    redis.start()
    await a.hears()
    await b.hears()
    await eventually(lambda: b.own() == ["stays"])
    for server in (a, b):
        await server.write()  # rows of all sessions, since it was emptied
    assert await a.listed() == ["stays"]


async def test_a_deletion_is_published_after_a_pause_that_cut_no_subscription(
    make: Make, redis: RedisServer
):
    a, b = await both(make, "gone", "stays")
    a.redis._deadline_s = 0.5
    redis.stop()
    assert not await a.delete("gone")
    redis.cont()
    assert a.shared.deletions.is_subscribed
    await asyncio.sleep(AWAY_S)
    a.redis._deadline_s = 10.0
    await a.write()
    await eventually(lambda: b.own() == ["stays"])
    assert await a.listed() == ["stays"]


async def test_a_deletion_that_waited_does_not_undo_a_later_one(make: Make, redis: RedisServer):
    a, b = await both(make, "gone")
    a.redis._deadline_s = 0.5
    redis.stop()
    assert not await a.delete("gone")
    redis.cont()
    await b.turn("gone")
    late = await make()
    await late.turn("gone")
    late.shared.deletions.receive = lambda raw: None  # type: ignore[method-assign]  # it is lost
    assert await b.delete("gone")
    await asyncio.sleep(AWAY_S)
    a.redis._deadline_s = 10.0
    await a.write()
    await late.turn("gone")  # of the same session
    await eventually(lambda: late.own() == [])


async def test_a_tombstone_that_redis_refuses_is_written_later(make: Make, client: redis_py.Redis):
    """Other servers may have missed the message, which a full Redis still passes on."""
    a, b = await both(make, "gone", "stays")
    heard = b.shared.deletions.receive
    b.shared.deletions.receive = lambda raw: None  # type: ignore[method-assign]  # it is lost
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    try:
        assert not await a.delete("gone")
        await a.write()
        assert client.keys("*deleted*") == []
    finally:
        client.config_set("maxmemory", 0)
    await a.write()
    await b.turn("gone")  # of the same session
    assert await a.listed() == ["stays"]
    await eventually(lambda: b.own() == ["stays"])
    b.shared.deletions.receive = heard  # type: ignore[method-assign]


async def test_a_subscription_that_was_cut_misses_nothing(make: Make, client: redis_py.Redis):
    a, b = await make(), await make()
    await b.turn("gone")
    heard = asyncio.Event()
    b.shared.deletions.receive = lambda raw: heard.set()  # type: ignore[method-assign]
    await a.delete("gone")
    await heard.wait()
    assert b.own() == ["gone"]
    client.client_kill_filter(_type="pubsub")
    await eventually(lambda: b.own() == [])


async def test_servers_of_other_secrets_see_nothing_of_each_other(make: Make):
    a, other = await make(), await make(secret=b"another secret, 16 bytes and more")
    await a.turn("one")
    assert await other.listed() == []
    await other.turn("one")
    await other.delete("one")
    await asyncio.sleep(0.1)
    assert a.own() == await a.listed() == ["one"]


async def test_names_and_contents_are_hidden(make: Make, client: redis_py.Redis):
    a = await make()
    await a.turn("my-session", "alice-and-bob")
    await a.turn("gone-session", "alice-and-bob")
    await a.delete("gone-session", "alice-and-bob")
    for key in client.scan_iter():
        kind = client.type(key)
        content = {b"zset": lambda key: b"".join(client.zrange(key, 0, -1))}.get(kind, client.get)
        shown = key + (b"" if kind == b"set" else content(key))
        assert b"session" not in shown.replace(b"thermocline:sessions", b"")
        assert b"alice" not in shown


async def test_hostile_values_are_no_rows_and_no_deletions(make: Make, client: redis_py.Redis):
    a, b = await make(), await make()
    await a.turn("one")
    await a.turn("two")
    first, second = client.keys("*:row:*")
    client.set(first, client.get(second))  # a row that was moved
    assert len(await b.listed()) == 1
    client.set(second, b"x" * 100_000)
    assert await b.listed() == []
    (index,) = client.keys("*:index")
    client.zadd(index, {b"\xff\xfe": 9e15, b"no such": 9e15})
    assert await b.listed() == []
    channel = a.shared.deletions._names.channel
    for message in (b"", b"x" * 100_000, client.get(first)):
        client.publish(channel, message)
    await a.turn("two")
    assert await b.listed() == ["two"]
    client.delete(index)
    client.set(index, b"no sorted set")
    assert await b.shared.page("alice", 10, None) is None
    assert a.own() == ["one", "two"]


async def test_a_message_that_is_sent_once_more_deletes_nothing_new(make, client):
    a, b = await make(), await make()
    heard: list[bytes] = []
    receive = b.shared.deletions.receive

    def noting(raw: bytes) -> None:
        heard.append(raw)
        receive(raw)

    b.shared.deletions.receive = noting  # type: ignore[method-assign]
    for server in (a, b):
        await server.turn("again")
    await a.delete("again")
    await eventually(lambda: b.own() == [])
    await asyncio.sleep(0.1)
    await b.turn("again")
    client.publish(b.shared.deletions._names.channel, heard[0])
    await eventually(lambda: len(heard) == 2)
    assert b.own() == ["again"]


async def test_a_server_that_was_suspended_looks_at_the_tombstones_of_old_messages(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    """They wait in its connection, which Redis keeps open."""
    monkeypatch.setattr("gateway.shared.deletions.STALE_S", -1.0)  # every message is old
    a, b = await both(make, "gone", "stays")
    assert await a.delete("gone")
    await eventually(lambda: b.own() == ["stays"])
    await b.shared.deletions.removed()
    assert ("alice", "gone") not in b.engine.held


async def test_an_engine_that_refuses_to_forget_is_asked_again(make: Make):
    a, b = await both(make, "gone")
    forget, refusals = b.engine.forget, [EngineUnavailable("not now")] * 2

    async def refusing(session):
        if refusals:
            raise refusals.pop()
        return await forget(session)

    b.engine.forget = refusing  # type: ignore[method-assign]
    await a.delete("gone")
    await eventually(lambda: not b.engine.held)
    assert not refusals


async def test_a_session_that_left_this_server_keeps_the_row_of_another(make: Make):
    a, b = await make(), await make()
    await a.turn("moved")
    await asyncio.sleep(0.2)  # a later use than within a moment
    await b.turn("moved")
    before = (await a.shared.elsewhere("alice", "moved")).rows
    a.engine.held.clear()
    await a.sessions.follower.ask()  # its own copy was evicted
    assert a.own() == []
    await a.write()
    assert (await a.shared.elsewhere("alice", "moved")).rows == before
    b.sessions.follower.receive(Notice("lost", absent(b.ref("moved")), "budget"))
    await b.write()
    assert await a.listed() == []


async def test_what_an_engine_took_along_is_listed_and_can_be_deleted(make: Make):
    """It had no disk: of the copies only those in Redis are left, and it lists none of them."""
    a, b = await make(), await make()
    await a.turn("saved")
    await a.turn("not-saved")
    a.engine.held["alice", "not-saved"].tier = None
    await a.sessions.follower.ask()
    a.engine.held.clear()
    await a.sessions.follower.ask()
    await a.write()
    assert a.own() == []
    assert await a.listed() == await b.listed() == ["saved"]
    a.engine.held["alice", "saved"] = b.engine.held["alice", "saved"] = Held(
        hot=False, tier="redis"
    )
    assert await b.delete("saved")
    assert not b.engine.held
    assert await a.listed() == []


async def test_a_cluster_is_shared_like_one_server(make: Make):
    with RedisCluster() as cluster:
        a, b = await make(cluster.url), await make(cluster.url)
        for tenant in ("alice", "bob", "carol"):
            await a.turn("one", tenant)
            await b.turn("two", tenant)
        assert await b.listed("bob") == ["two", "one"]
        assert await b.delete("one", "bob")
        await eventually(lambda: a.own("bob") == [])
        assert a.own("alice") == ["one"]
        assert await a.listed("bob") == ["two"]
        await a.stop()
        await b.stop()
