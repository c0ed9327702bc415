"""The directory of sessions: hostile servers, replays, clocks that jump, servers that were away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import msgspec
import pytest
import redis as redis_py

from kvstore.directory.boards import LEASE_S
from kvstore.errors import TierUnavailable
from tests.directory_rig import OneServer, rounds
from tests.redis_server import RedisServer
from tests.unit.scheduler.conftest import Held

pytestmark = pytest.mark.redis
Make = Callable[..., OneServer]


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
def make(redis: RedisServer, client: redis_py.Redis) -> Iterator[Make]:
    made: list[OneServer] = []

    def make(name: str, **secret: bytes) -> OneServer:
        made.append(OneServer(redis.url, name, **secret))
        return made[-1]

    yield make
    for server in made:
        server.close()


def everything(client: redis_py.Redis) -> dict[bytes, bytes]:
    return {key: client.get(key) for key in client.keys("thermocline:directory:*")}


async def test_each_server_knows_the_sessions_of_the_others(make: Make):
    a, b = make("a"), make("b")
    await a.turn("one")
    await a.turn("two")
    await b.turn("three")
    await rounds(a, b)
    assert await b.elsewhere() == ["one", "two"]
    assert await a.elsewhere() == ["three"]
    assert await a.elsewhere("bob") == []
    (found,) = await b.directory.elsewhere("alice", "one")
    assert (found.server, found.lives, found.row.tokens) == ("a", True, 0)


async def test_a_deletion_removes_what_began_before_it_and_nothing_after(make: Make):
    a, b = make("a"), make("b")
    for server in (a, b):
        await server.turn("gone")
        await server.turn("stays")
    await rounds(a, b)
    await a.sessions.forget(a.ref("gone"))
    a.directory.note_deleted("alice", ["gone"])
    await rounds(a, b)
    assert b.own() == ["stays"]
    assert ("alice", "gone") not in b.engine.held
    assert await a.elsewhere() == ["stays"]
    await b.turn("gone")
    await rounds(a, b)
    assert b.own() == ["gone", "stays"]
    assert await a.elsewhere() == ["gone", "stays"]


async def test_a_server_that_was_away_forgets_before_it_lists(make: Make):
    a, late = make("a"), make("late")
    await a.turn("gone")
    await a.sessions.forget(a.ref("gone"))
    a.directory.note_deleted("alice", ["gone"])
    await rounds(a)
    late.engine.held = {("alice", "gone"): Held(hot=False), ("alice", "stays"): Held(hot=False)}
    await late.round()
    await late.sessions.follower.ask()
    assert late.own() == ["stays"]
    assert list(late.engine.held) == [("alice", "stays")]


async def test_an_engine_that_was_away_forgets_before_it_lists(make: Make):
    a, b = make("a"), make("b")
    for server in (a, b):
        await server.turn("gone")
    await rounds(a, b)
    b.engine.down = True
    a.directory.note_deleted("alice", ["gone"])
    await a.round()
    await b.directory.round()
    await asyncio.sleep(0.05)
    assert b.own() == []  # it is not listed while it is still to be removed
    b.engine.down = False
    await b.sessions.follower.ask()
    assert b.own() == []
    assert b.engine.held == {}
    await b.directory.removals.done()


async def test_a_session_that_began_after_a_deletion_is_kept_by_the_next_life(make: Make):
    a, b = make("a"), make("b")
    await a.turn("again")
    b.directory.note_deleted("alice", ["again"])
    await rounds(b, a)
    await a.turn("again")
    await rounds(a, b)
    life2 = make("a")
    life2.engine.held = {("alice", "again"): Held(hot=False)}
    await life2.round()
    await life2.sessions.follower.ask()
    assert life2.own() == ["again"]


async def test_a_split_network_is_made_up_for(make: Make, redis: RedisServer):
    """One server deletes while Redis is away, the other one goes on; Redis comes back empty."""
    a, b = make("a"), make("b")
    for server in (a, b):
        await server.turn("gone")
        await server.turn("stays")
    await rounds(a, b)
    redis.kill()
    for server in (a, b):
        with pytest.raises(TierUnavailable):
            await server.round()
    await a.sessions.forget(a.ref("gone"))
    a.directory.note_deleted("alice", ["gone"])
    await b.turn("gone")
    assert a.own() == ["stays"]
    redis.start()
    for server in (a, b):
        server.clock.now += 60  # it is asked again
        for _ in range(100):
            try:
                await server.round()
                break
            except TierUnavailable:
                await asyncio.sleep(0.1)
    await rounds(a, b)
    assert b.own() == ["stays"]
    assert await a.elsewhere() == ["stays"]


async def test_nothing_of_a_session_can_be_read_on_the_server(make: Make, client: redis_py.Redis):
    a = make("server-name")
    await a.turn("session-name", "tenant-name")
    a.directory.note_deleted("tenant-name", ["deleted-name"])
    await rounds(a)
    stored = everything(client)
    assert len(stored) == 3  # a board, deletions and a page
    for key, value in stored.items():
        for word in (b"session-name", b"tenant-name", b"deleted-name", b"server-name"):
            assert word not in key
            assert word not in value


async def test_changed_moved_or_made_up_rows_are_not_believed(make: Make, client: redis_py.Redis):
    a, b = make("a"), make("b")
    await a.turn("of-alice", "alice")
    await a.turn("of-bob", "bob")
    await rounds(a, b)
    stored = everything(client)
    pages = {a.directory.page_key("alice", "of-alice"), a.directory.page_key("bob", "of-bob")}
    one, other = sorted(x.encode() for x in pages)
    client.set(one, stored[other])  # a page of another tenant's
    client.set(other, stored[one])
    assert await b.elsewhere("alice") == await b.elsewhere("bob") == []
    for key, value in stored.items():
        for at in (0, len(value) // 2, len(value) - 1):
            client.set(key, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
            await b.round()
        client.set(key, b"x" * (3 << 20))
        await b.round()
        client.delete(key)
        client.rpush(key, "another type")
        await b.round()
        client.delete(key)
    assert await b.elsewhere("alice") == []
    await b.turn("own", "alice")
    await rounds(a, b)  # and both go on
    assert await a.elsewhere("alice") == ["own"]


async def test_servers_of_another_secret_never_meet(make: Make):
    a, foreign = make("a"), make("b", secret=b"a secret of another server")
    await a.turn("one")
    await foreign.turn("one")
    foreign.directory.note_deleted("alice", ["one"])
    await rounds(a, foreign)
    assert a.own() == ["one"]
    assert await a.elsewhere() == await foreign.elsewhere() == []


async def test_a_replayed_deletion_removes_nothing_that_began_since(
    make: Make, client: redis_py.Redis
):
    a, b = make("a"), make("b")
    await a.turn("again")
    await rounds(a, b)
    b.directory.note_deleted("alice", ["again"])
    await rounds(b, a)
    older = everything(client)
    await a.turn("again")
    await rounds(a, b)
    for key, value in older.items():
        client.set(key, value)
    for server in (a, b, make("c")):
        await server.round()
    assert a.own() == ["again"]


async def test_a_replayed_row_brings_no_deleted_session_back(make: Make, client: redis_py.Redis):
    a, b = make("a"), make("b")
    await a.turn("gone")
    await rounds(a, b)
    older = everything(client)
    b.directory.note_deleted("alice", ["gone"])
    await rounds(b, a)
    for key, value in older.items():
        client.set(key, value)
    assert await b.elsewhere() == []
    await rounds(a, b)
    assert await b.elsewhere() == []
    assert a.own() == []


async def test_clocks_that_jump_change_no_belief(make: Make):
    a, b = make("a"), make("b")
    await a.turn("stays")
    await a.turn("gone")
    await rounds(a, b)
    for by_s in (86_400, -86_400):
        for server in (a, b):
            server.redis.by_s = by_s
        await rounds(a, b)
        (found, _) = await b.directory.elsewhere("alice")
        assert found.lives
        assert found.idle_s < 60
    b.clock.now += 86_400  # and its own clock, which never should
    await a.round()
    a.clock.now += LEASE_S
    await rounds(a, b)
    b.directory.note_deleted("alice", ["gone"])
    await rounds(b, a)
    assert a.own() == ["stays"]
    assert await b.elsewhere() == ["stays"]


async def test_a_stale_lease_is_seen_by_ones_own_clock_alone(make: Make):
    a, b = make("a"), make("b")
    await a.turn("one")
    await rounds(a, b)
    b.clock.now += LEASE_S / 2
    (found,) = await b.directory.elsewhere("alice")
    assert found.lives
    b.clock.now += LEASE_S / 2
    (found,) = await b.directory.elsewhere("alice")
    assert not found.lives
    assert found.row.id == "one"
    a.clock.now += LEASE_S
    await rounds(a, b)  # it comes back
    (found,) = await b.directory.elsewhere("alice")
    assert found.lives


async def answered(asker: OneServer, verb: str, id: str, *others: OneServer) -> tuple[int, bytes]:
    """Ask for a verb on another server's session; all do rounds until it is answered."""
    (found,) = await asker.directory.elsewhere("alice", id)
    asking = asyncio.create_task(asker.directory.ask(found, verb, "alice"))
    while not asking.done():
        await asyncio.sleep(0)
        for server in (asker, *others):
            await server.round()
    return tuple(asking.result())


async def test_a_verb_is_carried_out_by_the_server_that_has_the_session(make: Make):
    a, b = make("a"), make("b")
    await a.turn("one")
    await rounds(a, b)
    status, body = await answered(b, "pin", "one", a)
    assert (status, msgspec.json.decode(body)["pinned"]) == (200, True)
    assert a.engine.held["alice", "one"].pinned
    status, body = await answered(b, "demote", "one", a)
    assert (status, msgspec.json.decode(body)["state"]) == (200, "cold")
    a.engine.down = True
    status, body = await answered(b, "unpin", "one", a)
    assert (status, msgspec.json.decode(body)["error"]["code"]) == (503, "engine_unavailable")
    a.engine.down = False
    a.sessions.table.begin(a.ref("one"))
    status, body = await answered(b, "demote", "one", a)
    assert (status, msgspec.json.decode(body)["error"]["code"]) == (409, "session_busy")


async def test_a_replayed_order_is_not_carried_out_again(make: Make, client: redis_py.Redis):
    a, b = make("a"), make("b")
    await a.turn("one")
    await rounds(a, b)
    (found,) = await b.directory.elsewhere("alice", "one")
    asking = asyncio.create_task(b.directory.ask(found, "pin", "alice"))
    await asyncio.sleep(0)
    await b.round()
    older = everything(client)  # with the order
    while not asking.done():
        await rounds(a, b)
        await asyncio.sleep(0)
    a.engine.held["alice", "one"].pinned = False
    for key, value in older.items():
        client.set(key, value)
    await a.round()
    assert not a.engine.held["alice", "one"].pinned
    next_life = make("a")  # knows no earlier orders, but the order is not meant for it
    next_life.engine.held = {("alice", "one"): Held()}
    await next_life.sessions.follower.ask()
    for key, value in older.items():
        client.set(key, value)
    await rounds(next_life)
    assert not next_life.engine.held["alice", "one"].pinned


async def test_a_verb_for_a_server_whose_lease_has_ended_is_refused_at_once(make: Make):
    a, b = make("a"), make("b")
    await a.turn("one")
    await rounds(a, b)
    (found,) = await b.directory.elsewhere("alice", "one")
    b.clock.now += LEASE_S
    assert await b.directory.ask(found, "pin", "alice") == (503, b"")


async def test_two_gateways_before_the_same_engines_agree_on_homes(make: Make):
    a, b = make("a"), make("b")
    await rounds(a, b)
    one = a.ref("one")
    a.homes.served(one, "http://e1")
    await rounds(a, b)
    assert b.homes.get(one) == "http://e1"
    b.homes.served(one, "http://e2")
    await rounds(b, a)
    assert (a.homes.get(one), b.homes.get(one)) == ("http://e2", "http://e2")
    a.homes.served(one, "http://e1")
    await rounds(a, b)
    b.homes.served(one, "http://e2")
    await b.round()  # it does not take the same news over again
    await a.round()
    assert (a.homes.get(one), b.homes.get(one)) == ("http://e2", "http://e2")
