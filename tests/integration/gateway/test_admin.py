"""Admins and tenants on a running server: snapshots, keys, others' sessions, findings, the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
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
    gateway = {"api_keys_file": str(file), "admin_keys": [ROOT[1]]}
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

    async def snapshot(self, key: str) -> Any:
        status, answer = await self.ask(key, "GET", "/v1/snapshot")
        assert status == 200, answer
        return answer

    async def until(self, key: str, session: str, **fields: Any) -> Any:
        """The row of a session, once a snapshot has it with these fields."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                for row in (await self.snapshot(key))["sessions"]:
                    if row["id"] == session and fields.items() <= row.items():
                        return row
                await asyncio.sleep(0.1)


@pytest.fixture
async def server(stack: FakeStack) -> AsyncIterator[Server]:
    async with aiohttp.ClientSession() as http:
        yield Server(http, stack.url)


async def test_a_session_is_seen_from_its_first_turn_to_its_end(server: Server):
    first = await server.snapshot(ALICE[0])
    assert (first["server"]["model"], first["server"]["admin"]) == (MODEL, False)
    await server.chat(ALICE[0], "seen")
    row = await server.until(ALICE[0], "seen", state="idle", turns=1)
    assert (row["last_source"], row["client"]) == ("first", "python")
    assert "tenant" not in row
    await server.ask(ALICE[0], "POST", "/v1/sessions/seen/demote", {})
    assert (await server.until(ALICE[0], "seen", state="cold"))["tier"] == "ram"
    await server.chat(ALICE[0], "seen")
    assert (await server.until(ALICE[0], "seen", turns=2))["last_source"] == "cold-ram"
    assert "one two three" not in json.dumps(await server.snapshot(ALICE[0]))
    _, one = await server.ask(ALICE[0], "GET", "/v1/sessions/seen")
    assert [x["source"] for x in one["last_turns"]] == ["first", "cold-ram"]
    assert one["last_turns"][1]["restored_tokens"] > 0
    steps = [(x["before"], x["after"]) for x in one["timeline"]]
    assert ("hibernating", "cold") in steps and ("cold", "waking") in steps
    await server.ask(ALICE[0], "DELETE", "/v1/sessions/seen")
    async with asyncio.timeout(WITHIN_S):
        while any(x["id"] == "seen" for x in (await server.snapshot(ALICE[0]))["sessions"]):
            await asyncio.sleep(0.1)


async def test_a_hostile_reader_sees_nothing_of_others(server: Server):
    await server.chat(ALICE[0], "alices-secret", "words of alice")
    await server.until(ALICE[0], "alices-secret", turns=1)
    await server.chat(BOB[0], "bobs-own")
    await server.until(BOB[0], "bobs-own", turns=1)
    assert "alice" not in json.dumps(await server.snapshot(BOB[0]))
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
    row = await server.until(ROOT[0], "helped", tenant="alice")
    assert row["state"] == "idle"
    status, _ = await server.ask(ROOT[0], "POST", "/v1/sessions/helped/demote", {})
    assert status == 404, "without a tenant it means its own sessions"
    path = "/v1/sessions/helped/demote?tenant=alice"
    status, _ = await server.ask(ROOT[0], "POST", path, {})
    assert status == 200
    await server.until(ROOT[0], "helped", tenant="alice", state="cold")
    _, mine = await server.ask(ALICE[0], "GET", "/v1/sessions/helped")
    assert mine["state"] == "cold"


async def test_a_key_is_made_used_and_revoked_while_the_server_runs(server: Server):
    status, made = await server.ask(ROOT[0], "POST", "/admin/keys", {"tenant": "carol"})
    assert status == 201
    await server.chat(made["key"], "hers")
    _, listed = await server.ask(ROOT[0], "GET", "/admin/keys")
    assert {x["tenant"] for x in listed["data"]} >= {"alice", "bob", "carol", "root"}
    text = json.dumps(listed)
    assert made["key"] not in text and ALICE[1].partition(":")[2] not in text
    assert [x["id"] for x in (await server.snapshot(made["key"]))["sessions"]] == ["hers"]
    status, _ = await server.ask(ROOT[0], "DELETE", f"/admin/keys/{made['id']}")
    assert status == 200
    for path in ("/v1/sessions", "/v1/snapshot"):
        status, _ = await server.ask(made["key"], "GET", path)
        assert status == 401
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
