"""Two servers on one Redis: each knows the other's sessions, and a deletion reaches both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.integration.launch.test_serve import Server
from tests.integration.launch.test_several_models import ask, chat
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(300)]

TOML = """
[store]
redis_url = "{redis}"
secret_file = "{secret}"
[gateway]
stored_bytes = 0
"""
PATIENCE_S = 60.0  # of these tests, on a busy machine
T = TypeVar("T")


def start(folder: Path, redis: RedisServer) -> Server:
    folder.mkdir(exist_ok=True)
    secret = folder.parent / "secret"
    if not secret.exists():
        secret.write_bytes(b"one secret of several servers")
        secret.chmod(0o600)
    (folder / "t.toml").write_text(TOML.format(redis=redis.url, secret=secret))
    return Server(folder, "--config", str(folder / "t.toml"))


def until(look: Callable[[], T], wanted: Callable[[T], object]) -> T:
    end = time.monotonic() + PATIENCE_S
    while not wanted(found := look()):
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return found


def listed(server: Server) -> dict[str, Any]:
    return {x["id"]: x for x in ask(server, "/v1/sessions")[2]["data"]}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def two(
    redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("two")
    servers = start(folder / "a", redis), start(folder / "b", redis)
    yield servers
    for server in servers:
        server.stop()


def test_each_lists_the_sessions_of_both(two):
    a, b = two
    chat(a, "fake", "of-a", "hello")
    chat(b, "fake", "of-b", "hello")
    seen = until(lambda: listed(a), lambda x: "of-b" in x)
    assert "elsewhere" not in seen["of-a"]
    assert seen["of-b"]["elsewhere"] is True
    until(lambda: listed(a)["of-b"]["tokens"], lambda x: x == listed(b)["of-b"]["tokens"])
    until(lambda: listed(b), lambda x: "of-a" in x)
    status, _, shown = ask(b, "/v1/sessions/of-a")
    assert (status, shown["id"], shown["state"]) == (200, "of-a", "cold")


def test_a_session_that_is_deleted_on_one_does_not_go_on_on_the_other(two):
    a, b = two
    said = ["one two three", "You said: one two three", "four"]
    for server in two:
        chat(server, "fake", "both", *said[:1])
    assert chat(b, "fake", "both", *said)[1].startswith("hot")
    assert ask(a, "/v1/sessions/both", method="DELETE")[0] == 200
    for server in (b, a):  # it takes up to five seconds on a machine that is not busy
        until(lambda server=server: listed(server), lambda found: "both" not in found)
    more = [*said, "You said: four", "five"]
    assert chat(b, "fake", "both", *more)[1] == "miss; tokens=0; reason=never-stored"


def test_a_session_is_deleted_from_a_server_that_does_not_have_it(two):
    a, b = two
    chat(a, "fake", "only-a", "hello")
    until(lambda: listed(b), lambda x: "only-a" in x)
    assert ask(b, "/v1/sessions/only-a", method="DELETE")[0] == 200
    until(lambda: listed(a), lambda x: "only-a" not in x)
    assert ask(b, "/v1/sessions/only-a", method="DELETE")[0] == 404
    assert "only-a" not in listed(b)


def test_other_verbs_are_for_the_server_that_has_the_session(two):
    a, b = two
    chat(a, "fake", "verbs", "hello")
    until(lambda: listed(b), lambda x: "verbs" in x)
    for verb in ("pin", "unpin", "demote", "prefetch"):
        status, _, answer = ask(b, f"/v1/sessions/verbs/{verb}", {})
        assert (status, answer["error"]["code"]) == (409, "session_elsewhere")
        assert ask(b, f"/v1/sessions/unknown/{verb}", {})[0] == 404
    assert ask(a, "/v1/sessions/verbs/pin", {})[2]["pinned"] is True


def test_without_redis_all_goes_on_and_deletions_are_made_up_for(two, redis):
    a, b = two
    for server in two:
        chat(server, "fake", "split", "hello")
    chat(a, "fake", "stays", "hello")
    redis.kill()
    status, _, answer = until(
        lambda: ask(a, "/v1/sessions/unknown", method="DELETE"), lambda x: x[0] == 503
    )
    assert answer["error"]["code"] == "redis_away"
    status, _, answer = ask(a, "/v1/sessions/split", method="DELETE")
    assert (status, answer["only_here"]) == (200, True)
    assert ask(a, "/v1/sessions")[2]["only_here"] is True
    assert chat(b, "fake", "split", "hello")[0] == 200
    redis.start()  # it has lost everything
    until(lambda: listed(b), lambda x: "split" not in x)
    until(lambda: listed(b), lambda x: "stays" in x)
    assert "split" not in listed(a)
