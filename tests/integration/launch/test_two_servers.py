"""Two servers on one Redis: each knows the other's sessions, and a deletion reaches both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch.test_serve import Server
from tests.integration.launch.test_several_models import ask, chat
from tests.redis_server import RedisServer
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(300)]

TOML = """
[store]
redis_url = "{redis}"
secret_file = "{secret}"
[gateway]
stored_bytes = 0
"""


def start(folder: Path, redis: RedisServer) -> Server:
    folder.mkdir(exist_ok=True)
    secret = folder.parent / "secret"
    if not secret.exists():
        secret.write_bytes(b"one secret of several servers")
        secret.chmod(0o600)
    (folder / "t.toml").write_text(TOML.format(redis=redis.url, secret=secret))
    return Server(folder, "--config", str(folder / "t.toml"))


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


def test_a_deletion_on_one_reaches_the_other(two):
    """A session that both have does not go on there; one may be deleted where it is not."""
    a, b = two
    said = ["one two three", "You said: one two three", "four"]
    for server in two:
        chat(server, "fake", "both", *said[:1])
    assert chat(b, "fake", "both", *said)[1].startswith("hot")
    chat(a, "fake", "only-a", "hello")
    until(lambda: "only-a" in listed(b))
    assert ask(a, "/v1/sessions/both", method="DELETE")[0] == 200
    assert ask(b, "/v1/sessions/only-a", method="DELETE")[0] == 200
    until(lambda: not any({"both", "only-a"} & listed(x).keys() for x in two))
    assert ask(b, "/v1/sessions/only-a", method="DELETE")[0] == 404
    more = [*said, "You said: four", "five"]
    assert chat(b, "fake", "both", *more)[1] == "miss; tokens=0; reason=never-stored"


def test_each_lists_the_sessions_of_both_and_acts_on_its_own(two):
    a, b = two
    chat(a, "fake", "verbs", "hello")
    until(lambda: "verbs" in listed(b))
    assert "elsewhere" not in listed(a)["verbs"] and listed(b)["verbs"]["elsewhere"] is True
    until(lambda: listed(a)["verbs"]["tokens"] == listed(b)["verbs"]["tokens"])
    status, _, shown = ask(b, "/v1/sessions/verbs")
    assert (status, shown["id"], shown["state"]) == (200, "verbs", "cold")
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
    until(lambda: ask(a, "/v1/sessions/unknown", method="DELETE")[0] == 503)
    answer = ask(a, "/v1/sessions/unknown", method="DELETE")[2]
    assert answer["error"]["code"] == "redis_away"
    status, _, answer = ask(a, "/v1/sessions/split", method="DELETE")
    assert (status, answer["only_here"]) == (200, True)
    assert ask(a, "/v1/sessions")[2]["only_here"] is True
    assert chat(b, "fake", "split", "hello")[0] == 200
    redis.start()  # it has lost everything
    until(lambda: "split" not in listed(b) and "stays" in listed(b))
    assert "split" not in listed(a)
