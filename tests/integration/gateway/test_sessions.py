"""The sessions API, what a tenant sees of others, and what admins see and may do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from typer.testing import CliRunner

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from gateway.keys import generate_key, read_key
from launch.cli.main import app

ALICE, BOB, ROOT = (generate_key(x) for x in ("alice", "bob", "root"))
WITHIN_S = 30.0


class Caller:
    """A client with a key."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self.http = http
        self.url = url
        self._headers = {"authorization": f"Bearer {key}"}

    async def call(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        async with self.http.request(
            method, self.url + path, json=body, headers={**self._headers, **headers}
        ) as answer:
            return answer.status, await answer.json(), dict(answer.headers)

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return (await self.call(method, path, body))[:2]

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
        status, body = await self.ask("GET", f"/v1/sessions/{quote(session, safe='')}")
        assert status == 200, body
        return body

    async def verb(self, session: str, verb: str, body: Any = None) -> tuple[int, Any]:
        return await self.ask("POST", f"/v1/sessions/{quote(session, safe='')}/{verb}", body or {})

    async def snapshot(self) -> Any:
        status, answer = await self.ask("GET", "/v1/snapshot")
        assert status == 200, answer
        return answer

    async def until(self, session: str, **fields: Any) -> Any:
        """The row of a session, once a snapshot has it with these fields."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                for row in (await self.snapshot())["sessions"]:
                    if row["id"] == session and fields.items() <= row.items():
                        return row
                await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    folder = tmp_path_factory.mktemp("stack")
    file = folder / "keys"
    file.write_text(f"{ALICE[1]}\n{BOB[1]}\n")
    gateway = {"api_keys_file": str(file), "admin_keys": [ROOT[1]]}
    with FakeStack(folder, gateway=gateway) as running:
        yield running


@pytest.fixture
async def callers(stack: FakeStack) -> Any:
    async with aiohttp.ClientSession() as http:
        yield [Caller(http, stack.url, key) for key, _ in (ALICE, BOB, ROOT)]


@pytest.fixture
def alice(callers: list[Caller]) -> Caller:
    return callers[0]


@pytest.fixture
def bob(callers: list[Caller]) -> Caller:
    return callers[1]


@pytest.fixture
def root(callers: list[Caller]) -> Caller:
    return callers[2]


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


@pytest.mark.parametrize(
    "session", ["a/b..c", "/a//b/", "%2e%2E", "with blank", "käse:@%41?q#f", "demote", "x" * 256]
)
async def test_a_session_of_any_id_is_pinned_and_forgotten(alice: Caller, session: str) -> None:
    _, headers = await alice.chat("hi", session=quote(session, safe=""))
    assert (await alice.one(session))["id"] == session
    pinned = (await alice.verb(session, "pin"))[1]
    assert (pinned["id"], pinned["pinned"]) == (session, True)
    again, _ = await alice.chat("hi", session=headers["x-thermocline-session"])
    assert cached(again) == 1  # its own header names the same session
    assert (await alice.verb(session, "unpin"))[1]["pinned"] is False
    path = f"/v1/sessions/{quote(session, safe='')}"
    status, body = await alice.ask("DELETE", path)
    assert (status, body["deleted"]) == (200, True)
    assert [(await alice.ask(x, path))[0] for x in ("GET", "DELETE")] == [404, 404]
    _, headers = await alice.chat("hi", session=quote(session, safe=""))
    assert headers["x-thermocline-cache"].startswith("miss")


async def test_unfit_requests(alice: Caller) -> None:
    await alice.chat("hi", session="fit")
    status, refusal = await alice.verb("fit", "demote", {"tier": "tape"})
    assert status == 400 and "ram, disk, redis" in refusal["error"]["message"]
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


# ---- snapshots and admins


async def test_a_session_is_seen_from_its_first_turn_to_its_end(alice):
    first = await alice.snapshot()
    assert (first["server"]["model"], first["server"]["admin"]) == (MODEL, False)
    await alice.chat("one two three", session="seen")
    row = await alice.until("seen", state="idle", turns=1)
    assert (row["last_source"], row["client"]) == ("first", "python")
    assert "tenant" not in row
    await alice.ask("POST", "/v1/sessions/seen/demote", {})
    assert (await alice.until("seen", state="cold"))["tier"] == "ram"
    await alice.chat("one two three", session="seen")
    assert (await alice.until("seen", turns=2))["last_source"] == "cold-ram"
    assert "one two three" not in json.dumps(await alice.snapshot())
    _, one = await alice.ask("GET", "/v1/sessions/seen")
    assert [x["source"] for x in one["last_turns"]] == ["first", "cold-ram"]
    assert one["last_turns"][1]["restored_tokens"] > 0
    steps = [(x["before"], x["after"]) for x in one["timeline"]]
    assert ("hibernating", "cold") in steps and ("cold", "waking") in steps
    await alice.ask("DELETE", "/v1/sessions/seen")
    async with asyncio.timeout(WITHIN_S):
        while any(x["id"] == "seen" for x in (await alice.snapshot())["sessions"]):
            await asyncio.sleep(0.1)


async def test_a_hostile_reader_sees_nothing_of_others(alice, bob):
    await alice.chat("words of alice", session="alices-secret")
    await alice.until("alices-secret", turns=1)
    await bob.chat("one two three", session="bobs-own")
    await bob.until("bobs-own", turns=1)
    assert "alice" not in json.dumps(await bob.snapshot())
    for method, path in (
        ("GET", "/v1/sessions?tenant=alice"),
        ("GET", "/v1/sessions/alices-secret?tenant=alice"),
        ("POST", "/v1/sessions/alices-secret/demote?tenant=alice"),
        ("DELETE", "/v1/sessions/alices-secret?tenant=alice"),
        ("GET", "/admin/keys"),
        ("POST", "/admin/keys"),
        ("DELETE", f"/admin/keys/{read_key(ALICE[1]).id}"),
        ("GET", "/admin/log"),
        ("GET", "/admin/findings"),
        ("POST", "/admin/measure"),
    ):
        status, answer = await bob.ask(method, path)
        assert (status, answer["error"]["code"]) == (403, "admin_only"), path


async def test_an_admin_sees_all_and_acts_for_a_tenant_that_it_names(alice, root):
    await alice.chat("one two three", session="helped")
    row = await root.until("helped", tenant="alice")
    assert row["state"] == "idle"
    status, _ = await root.ask("POST", "/v1/sessions/helped/demote", {})
    assert status == 404, "without a tenant it means its own sessions"
    path = "/v1/sessions/helped/demote?tenant=alice"
    status, _ = await root.ask("POST", path, {})
    assert status == 200
    await root.until("helped", tenant="alice", state="cold")
    _, mine = await alice.ask("GET", "/v1/sessions/helped")
    assert mine["state"] == "cold"


async def test_a_key_is_made_used_and_revoked_while_the_server_runs(root):
    status, made = await root.ask("POST", "/admin/keys", {"tenant": "carol"})
    assert status == 201
    carol = Caller(root.http, root.url, made["key"])
    await carol.chat("one two three", session="hers")
    _, listed = await root.ask("GET", "/admin/keys")
    assert {x["tenant"] for x in listed["data"]} >= {"alice", "bob", "carol", "root"}
    text = json.dumps(listed)
    assert made["key"] not in text and ALICE[1].partition(":")[2] not in text
    assert [x["id"] for x in (await carol.snapshot())["sessions"]] == ["hers"]
    status, _ = await root.ask("DELETE", f"/admin/keys/{made['id']}")
    assert status == 200
    for path in ("/v1/sessions", "/v1/snapshot"):
        status, _ = await carol.ask("GET", path)
        assert status == 401
    for field, body in (
        ("tenant", {"tenant": "no/name"}),
        ("tenant", {"tenant": "x", "sessions": -1}),
        ("tenant", {}),
        ("ram_bytes", {"tenant": "x", "ram_bytes": "4MiB"}),
    ):
        status, refusal = await root.ask("POST", "/admin/keys", body)
        assert (status, refusal["error"]["param"]) == (400, field), body


async def test_an_admin_reads_findings_and_has_the_model_measured(root):
    status, found = await root.ask("GET", "/admin/findings")
    assert status == 200 and {x["about"] for x in found["data"]} >= {"engine", "codec"}
    status, begun = await root.ask("POST", "/admin/measure", {})
    assert status == 202 and begun["progress"].startswith("measuring")
    status, lines = await root.ask("GET", "/admin/log?limit=5")
    assert status == 200 and lines["object"] == "list"
    status, _ = await root.ask("GET", "/admin/log?limit=x")
    assert status == 400


def test_keys_are_made_and_revoked_from_a_shell(stack):
    def run(*arguments: str, key: str = ROOT[0]) -> Any:
        return CliRunner().invoke(app, ["keys", *arguments, "--url", stack.url, "--api-key", key])

    made = run("new", "carol")
    assert made.exit_code == 0, made.output
    lines = (x.split(":") for x in made.output.splitlines())
    said = {name: value.strip() for name, value in lines}
    assert said["id"] in run("list").output and "carol" in run("list").output
    assert run("list", key=said["key"]).exit_code != 0, "it is no admin's"
    assert run("revoke", said["id"]).exit_code == 0
    assert "carol" not in run("list").output
    for refused in (run("new", "#x"), run("new", "x", "--append", "f"), run("revoke", said["id"])):
        assert refused.exit_code != 0
