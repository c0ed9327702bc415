"""The sessions API, and that a tenant sees its own sessions only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from gateway.keys import generate_key

KEYS = {tenant: generate_key(tenant) for tenant in ("alice", "bob")}


class Caller:
    """One tenant's view of the server."""

    def __init__(self, http: aiohttp.ClientSession, url: str, tenant: str) -> None:
        self._http = http
        self._url = url
        self._headers = {"authorization": f"Bearer {KEYS[tenant][0]}"}

    async def call(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        async with self._http.request(
            method, self._url + path, json=body, headers={**self._headers, **headers}
        ) as answer:
            return answer.status, await answer.json(), dict(answer.headers)

    async def chat(
        self, *texts: str, session: str = "", **fields: Any
    ) -> tuple[Any, dict[str, str]]:
        """Messages that alternate between user and assistant."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        status, body, headers = await self.call(
            "POST",
            "/v1/chat/completions",
            {"model": MODEL, "messages": messages, **fields},
            **({"x-session-id": session} if session else {}),
        )
        assert status == 200, body
        return body, headers

    async def one(self, session: str) -> Any:
        status, body, _ = await self.call("GET", f"/v1/sessions/{quote(session, safe='')}")
        assert status == 200, body
        return body

    async def verb(self, session: str, verb: str, body: Any = None) -> tuple[int, Any]:
        path = f"/v1/sessions/{quote(session, safe='')}/{verb}"
        status, answer, _ = await self.call("POST", path, body or {})
        return status, answer


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    keys = [line for _, line in KEYS.values()]
    folder = tmp_path_factory.mktemp("stack")
    with FakeStack(folder, gateway={"api_keys": keys}) as running:
        yield running


@pytest.fixture
async def http() -> Any:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def alice(http: aiohttp.ClientSession, stack: FakeStack) -> Caller:
    return Caller(http, stack.url, "alice")


@pytest.fixture
def bob(http: aiohttp.ClientSession, stack: FakeStack) -> Caller:
    return Caller(http, stack.url, "bob")


def cached(body: Any) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_session_from_hot_to_cold_and_back(alice: Caller) -> None:
    await alice.chat("one two three", session="life")
    hot = await alice.one("life")
    fields = {"id", "state", "tier", "tokens", "bytes", "idle_s", "pinned", "kind", "parent"}
    assert set(hot) >= fields | {"retain_s", "prefix", "timeline", "last_turns"}
    assert (hot["state"], hot["tier"], hot["tokens"]) == ("idle", "ram", 10)

    status, cold = await alice.verb("life", "demote", {"tier": "disk"})
    assert status == 200
    assert (cold["state"], cold["tier"]) == ("cold", "disk")
    assert 0 < cold["bytes"] < hot["bytes"]

    _, headers = await alice.chat(
        "one two three", "You said: one two three", "more", session="life"
    )
    assert headers["x-thermocline-cache"] == "cold-disk; tokens=10"
    assert (await alice.one("life"))["state"] == "idle"


async def test_prefetch_wakes_before_the_turn(alice: Caller) -> None:
    await alice.chat("one", session="sleepy")
    await alice.verb("sleepy", "demote")
    status, woken = await alice.verb("sleepy", "prefetch")
    assert (status, woken["state"]) == (200, "idle")
    _, headers = await alice.chat("one", "You said: one", "two", session="sleepy")
    assert headers["x-thermocline-cache"].startswith("hot")


async def test_pin_and_unpin(alice: Caller) -> None:
    await alice.chat("one", session="pinned")
    assert (await alice.verb("pinned", "pin"))[1]["pinned"] is True
    assert (await alice.verb("pinned", "unpin"))[1]["pinned"] is False


async def test_a_session_that_is_served_stays_awake_and_the_caller_hears_it(alice: Caller) -> None:
    await alice.chat("one", session="served")
    endless = {"fake": "chunks=1000 delay_s=1"}
    talking = asyncio.create_task(alice.chat("one", "1", "two", session="served", metadata=endless))
    while (await alice.one("served"))["state"] != "active":
        await asyncio.sleep(0.01)
    status, body = await alice.verb("served", "demote")
    assert (status, body["error"]["code"]) == (409, "session_busy")
    assert (await alice.one("served"))["state"] == "active"
    talking.cancel()


async def test_forget_leaves_nothing(alice: Caller) -> None:
    await alice.chat("one two", session="secret")
    status, body, _ = await alice.call("DELETE", "/v1/sessions/secret")
    assert (status, body["deleted"]) == (200, True)
    assert (await alice.call("GET", "/v1/sessions/secret"))[0] == 404
    assert (await alice.call("DELETE", "/v1/sessions/secret"))[0] == 404
    _, headers = await alice.chat("one two", session="secret")
    assert headers["x-thermocline-cache"].startswith("miss")


@pytest.mark.parametrize(
    "session", ["a/b..c", "/a//b/", "%2e%2E", "with blank", "käse:@%41?q#f", "demote", "x" * 256]
)
async def test_odd_ids(alice: Caller, session: str) -> None:
    _, headers = await alice.chat("hi", session=quote(session, safe=""))
    assert (await alice.one(session))["id"] == session
    assert (await alice.verb(session, "pin"))[1]["id"] == session
    again, _ = await alice.chat("hi", session=headers["x-thermocline-session"])
    assert cached(again) == 1  # its own header names the same session
    path = f"/v1/sessions/{quote(session, safe='')}"
    assert (await alice.call("DELETE", path))[0] == 200
    assert (await alice.call("GET", path))[0] == 404


async def test_unfit_requests(alice: Caller) -> None:
    await alice.chat("hi", session="fit")
    assert (await alice.verb("fit", "demote", {"tier": "tape"}))[0] == 400
    assert (await alice.verb("fit", "demote", {"to": "disk"}))[0] == 400
    assert (await alice.verb("fit", "explode"))[0] in (404, 405)
    assert (await alice.call("GET", "/v1/sessions/" + "x" * 257))[0] == 400


# ---- tenancy


NAMES: list[Callable[[str], dict[str, Any]]] = [
    lambda name: {"session": name},
    lambda name: {"session_id": name},
    lambda name: {"prompt_cache_key": name},
    lambda name: {"conversation": {"id": name}},
    lambda name: {"metadata": {"user_id": f"user_1_session_{name.rpartition(' ')[2]}"}},
    lambda name: {"session_id": name, "cache_salt": "alice", "kv_transfer_params": {"a": 1}},
]


@pytest.mark.parametrize("named", NAMES)
async def test_naming_a_foreign_session_reuses_nothing(alice, bob, named):
    name = f"shared name {time.monotonic_ns()}"
    await alice.chat("the very same words", **named(name))
    body, headers = await bob.chat("the very same words", **named(name))
    assert cached(body) == 0
    assert headers["x-thermocline-cache"] == "miss; tokens=0; reason=never-stored"
    body, _ = await alice.chat("the very same words", **named(name))
    assert cached(body) > 0
