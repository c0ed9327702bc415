"""The list of replicas: for those with the token, of those that have announced themselves."""

from __future__ import annotations

import os

import pytest
from starlette.requests import Request

from engines.on_ray.replica_directory import LEASE_S, ReplicaDirectory
from engines.pool.listed_pool import engine_token, list_token, read_listing


class Rig:
    def __init__(self, folder) -> None:
        self.now = 100.0
        self.secret = os.urandom(32)
        path = folder / "secret"
        path.write_bytes(self.secret)
        self.directory = ReplicaDirectory(str(path), clock=lambda: self.now)

    async def ask(self, token: str) -> tuple[int, bytes]:
        headers = [(b"authorization", f"Bearer {token}".encode())]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        answer = await self.directory(Request(scope))
        return answer.status_code, bytes(answer.body)

    async def names(self) -> list[str]:
        status, body = await self.ask(list_token(self.secret))
        assert status == 200
        return [x.name for x in read_listing(body)]

    async def announce(self, name: str, **more: object) -> None:
        own = {"name": name, "url": "http://127.0.0.1:1", "control": "tcp://127.0.0.1:2"}
        await self.directory.announce(own | more)


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(tmp_path)


async def test_a_replica_stays_on_the_list_for_as_long_as_it_says_so(rig):
    rig.now += LEASE_S
    await rig.announce("a")
    rig.now += LEASE_S / 2
    await rig.announce("b")
    assert await rig.names() == ["a", "b"]
    rig.now += LEASE_S * 0.75
    assert await rig.names() == ["b"]


async def test_after_its_own_start_there_is_no_list_yet(rig):
    await rig.announce("a")
    assert (await rig.ask(list_token(rig.secret)))[0] == 503
    rig.now += LEASE_S / 2
    await rig.announce("a")
    rig.now += LEASE_S / 2
    assert await rig.names() == ["a"]


async def test_the_token_of_replicas_is_not_that_of_the_list(rig):
    rig.now += LEASE_S
    for wrong in ("", "x", engine_token(rig.secret)):
        assert (await rig.ask(wrong))[0] == 401


async def test_an_announcement_that_makes_no_sense_is_refused(rig):
    with pytest.raises(ValueError):
        await rig.announce("a", url="file:///etc/passwd")
