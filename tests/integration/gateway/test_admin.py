"""Admins and tenants on a running server: events, keys, others' sessions, findings, the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from gateway.keys import generate_key, key_facts
from launch.cli.main import app

ALICE, BOB, ROOT = (generate_key(x) for x in ("alice", "bob", "root"))
WITHIN_S = 30.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    folder = tmp_path_factory.mktemp("stack")
    file = folder / "keys"
    file.write_text(f"{ALICE[1]}\n{BOB[1]}\n")
    gateway = {"api_keys_file": str(file), "admin_keys": [ROOT[1]], "max_event_streams": 2}
    with FakeStack(folder, gateway=gateway) as running:
        yield running


class Server:
    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http = http
        self.url = url

    async def ask(self, key: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}"}
        async with self.http.request(method, self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def chat(self, key: str, session: str, text: str = "one two three") -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
        body["session_id"] = session
        status, answer = await self.ask(key, "POST", "/v1/chat/completions", body)
        assert status == 200, answer

    @asynccontextmanager
    async def events(self, key: str, last: str = "") -> AsyncIterator[Events]:
        headers = {"authorization": f"Bearer {key}", "last-event-id": last}
        async with self.http.get(self.url + "/v1/events", headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            yield Events(answer.content)


class Events:
    """A reader that remembers all bytes it was sent."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        self.seen = b""
        self.last_id = ""

    async def next(self) -> tuple[str, Any]:
        """The next event and its data; comments are passed over."""
        async with asyncio.timeout(WITHIN_S):
            name = ""
            while True:
                line = await self._content.readuntil(b"\n")
                self.seen += line
                if line.startswith(b"id: "):
                    self.last_id = line[4:].decode().strip()
                if line.startswith(b"event: "):
                    name = line[7:].decode().strip()
                if line.startswith(b"data: "):
                    return name, json.loads(line[6:])

    async def until(self, session: str, **fields: Any) -> Any:
        """The row of a session, once an event has it with these fields."""
        while True:
            _, event = await self.next()
            for row in event.get("sessions", ()):
                if row["id"] == session and fields.items() <= row.items():
                    return row


@pytest.fixture
async def server(stack: FakeStack) -> AsyncIterator[Server]:
    async with aiohttp.ClientSession() as http:
        yield Server(http, stack.url)


async def test_a_session_is_seen_from_its_first_turn_to_its_end(server: Server):
    async with server.events(ALICE[0]) as events:
        name, first = await events.next()
        assert name == "snapshot"
        assert (first["server"]["model"], first["server"]["admin"]) == (MODEL, False)
        await server.chat(ALICE[0], "seen")
        row = await events.until("seen", state="idle", turns=1)
        assert (row["last_source"], row["client"]) == ("miss", "python")
        assert "tenant" not in row
        await server.ask(ALICE[0], "POST", "/v1/sessions/seen/demote", {})
        assert (await events.until("seen", state="cold"))["tier"] == "ram"
        await server.chat(ALICE[0], "seen")
        assert (await events.until("seen", turns=2))["last_source"] == "cold-ram"
        _, one = await server.ask(ALICE[0], "GET", "/v1/sessions/seen")
        assert [x["source"] for x in one["last_turns"]] == ["miss", "cold-ram"]
        assert one["last_turns"][1]["restored_tokens"] > 0
        steps = [(x["before"], x["after"]) for x in one["timeline"]]
        assert ("hibernating", "cold") in steps and ("cold", "waking") in steps
        await server.ask(ALICE[0], "DELETE", "/v1/sessions/seen")
        while not (event := (await events.next())[1]).get("gone"):
            pass
        assert event["gone"] == [{"id": "seen"}]
        assert b"one two three" not in events.seen


async def test_a_hostile_reader_sees_nothing_of_others(server: Server):
    async with server.events(ALICE[0]) as events, server.events(BOB[0]) as spy:
        await spy.next()
        await server.chat(ALICE[0], "alices-secret", "words of alice")
        await events.until("alices-secret", turns=1)
        await server.chat(BOB[0], "bobs-own")
        await spy.until("bobs-own", turns=1)
    for id in (spy.last_id, events.last_id, events.last_id.split(".")[0] + ".0", "0.0"):
        async with server.events(BOB[0], last=id) as again:
            name, _ = await again.next()
            assert name == "snapshot" or id == spy.last_id
            assert b"alice" not in again.seen
    assert b"alice" not in spy.seen
    for method, path in (
        ("GET", "/v1/sessions?tenant=alice"),
        ("GET", "/v1/sessions/alices-secret?tenant=alice"),
        ("POST", "/v1/sessions/alices-secret/demote?tenant=alice"),
        ("DELETE", "/v1/sessions/alices-secret?tenant=alice"),
        ("GET", "/admin/keys"),
        ("POST", "/admin/keys"),
        ("DELETE", f"/admin/keys/{key_facts(ALICE[1]).id}"),
        ("GET", "/admin/log"),
        ("GET", "/admin/findings"),
        ("POST", "/admin/measure"),
    ):
        status, answer = await server.ask(BOB[0], method, path)
        assert (status, answer["error"]["code"]) == (403, "admin_only"), path


async def test_an_admin_sees_all_and_acts_for_a_tenant_that_it_names(server: Server):
    await server.chat(ALICE[0], "helped")
    async with server.events(ROOT[0]) as events:
        row = await events.until("helped", tenant="alice")
        assert row["state"] == "idle"
        status, _ = await server.ask(ROOT[0], "POST", "/v1/sessions/helped/demote", {})
        assert status == 404, "without a tenant it means its own sessions"
        path = "/v1/sessions/helped/demote?tenant=alice"
        status, _ = await server.ask(ROOT[0], "POST", path, {})
        assert status == 200
        await events.until("helped", tenant="alice", state="cold")
    _, mine = await server.ask(ALICE[0], "GET", "/v1/sessions/helped")
    assert mine["state"] == "cold"


async def test_a_reader_resumes_with_what_it_missed(server: Server):
    async with server.events(ALICE[0]) as events:
        await events.next()
        await server.chat(ALICE[0], "received")
        await events.until("received", turns=1)
    await server.chat(ALICE[0], "missed")
    async with server.events(ALICE[0], last=events.last_id) as again:
        name, _ = await again.next()
        assert name == "change"


async def test_streams_are_bounded_for_each_tenant(server: Server):
    async with server.events(BOB[0]), server.events(BOB[0]):
        status, answer = await server.ask(BOB[0], "GET", "/v1/events")
        assert (status, answer["error"]["code"]) == (429, "too_many_streams")
        async with server.events(ALICE[0]) as other:
            assert (await other.next())[0] == "snapshot"


async def test_a_key_is_made_used_and_revoked_while_the_server_runs(server: Server):
    status, made = await server.ask(ROOT[0], "POST", "/admin/keys", {"tenant": "carol"})
    assert status == 201
    await server.chat(made["key"], "hers")
    _, listed = await server.ask(ROOT[0], "GET", "/admin/keys")
    assert {x["tenant"] for x in listed["data"]} >= {"alice", "bob", "carol", "root"}
    text = json.dumps(listed)
    assert made["key"] not in text and ALICE[1].partition(":")[2] not in text
    async with server.events(made["key"]) as events:
        await events.next()
        status, _ = await server.ask(ROOT[0], "DELETE", f"/admin/keys/{made['id']}")
        assert status == 200
        status, _ = await server.ask(made["key"], "GET", "/v1/sessions")
        assert status == 401
        while (await events.next())[0] != "end":
            pass
    for body in ({"tenant": "no/name"}, {"tenant": "x", "sessions": -1}, {}):
        status, _ = await server.ask(ROOT[0], "POST", "/admin/keys", body)
        assert status == 400, body


async def test_an_admin_reads_findings_and_has_the_model_measured(server: Server):
    status, found = await server.ask(ROOT[0], "GET", "/admin/findings")
    assert status == 200 and {x["about"] for x in found["data"]} >= {"engine", "codec"}
    status, begun = await server.ask(ROOT[0], "POST", "/admin/measure", {})
    assert status == 202 and begun["progress"].startswith("measuring")
    status, lines = await server.ask(ROOT[0], "GET", "/admin/log?limit=5")
    assert status == 200 and lines["object"] == "list"
    status, _ = await server.ask(ROOT[0], "GET", "/admin/log?limit=x")
    assert status == 400


def test_keys_are_made_and_revoked_from_a_shell(stack: FakeStack):
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
