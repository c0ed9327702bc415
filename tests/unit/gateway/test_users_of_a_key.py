"""A header names the user within a key, where the settings say so."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from gateway.config import GatewayConfig
from gateway.identity.known_chats import MAX_TENANTS, KnownChats, Link
from gateway.keys import Tenant, Tenants
from gateway.watch.tally import MAX_TENANTS as MAX_TALLIES
from gateway.watch.tally import Tallies
from tests.unit.gateway.identity.test_known_chats import none_known
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, chat_answer

HEADER = "X-OpenWebUI-User-Id"
KEY = "Bearer tc-front-end"
LINE = f"ui:{hashlib.sha256(b'tc-front-end').hexdigest()}"
SAID: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}]}


def made(*, header: str = HEADER, line: str = LINE, **settings: Any) -> App:
    engine = RecordingEngine(chat_answer())
    return App(engine, api_keys=(line,), trust_user_header=header, **settings)


async def ask(app: App, user: str = "", **headers: str) -> int:
    given = {"authorization": KEY, "x_openwebui_user_id": user, **headers}
    return (await app.post("/v1/chat/completions", SAID, **given)).status


def asked_as(app: App) -> list[tuple[str, str]]:
    return [(x.headers["x-tenant"], x.headers["x-salt"]) for x in app.engine.asked]


async def test_users_of_one_key_share_no_session_and_no_name_of_cold_data() -> None:
    app = made()
    for user in ("u1", "u2", ""):
        for session in ("", "s"):  # found by its messages, and named
            assert await ask(app, user, x_session_id=session) == 200
    tenants = asked_as(app)
    assert [x for x, _ in tenants] == ["ui/u1", "ui/u1", "ui/u2", "ui/u2", "ui", "ui"]
    assert len({salt for _, salt in tenants}) == 3
    for user, found in (("u1", 2), ("u2", 2), ("u3", 0), ("", 2)):
        headers = {"authorization": KEY, "x_openwebui_user_id": user}
        listed = (await app.get("/v1/sessions", **headers)).json["data"]
        assert len(listed) == found
        answer = await app.call("DELETE", "/v1/sessions/s", b"", headers)
        assert answer.status == (200 if found else 404)


async def test_limits_are_each_users() -> None:
    app = made(line=f"{LINE} requests_per_minute=2")
    assert [await ask(app, x) for x in ("a", "a", "a", "b")] == [200, 200, 429, 200]


async def test_without_the_setting_the_header_means_nothing() -> None:
    app = made(header="")
    assert await ask(app, "u1") == 200
    assert [x for x, _ in asked_as(app)] == ["ui"]


async def test_an_admin_names_a_user_as_a_tenant() -> None:
    line = f"ops:{hashlib.sha256(b'tc-admin').hexdigest()}"
    app = made(admin_keys=(line,))
    assert await ask(app, "u1", x_session_id="s") == 200
    listed = await app.get("/v1/sessions?tenant=ui/u1", authorization="Bearer tc-admin")
    assert [x["id"] for x in listed.json["data"]] == ["s"]
    named = {"authorization": "Bearer tc-admin", "x_openwebui_user_id": "u2"}
    for path in ("/v1/sessions?tenant=ui/u1", "/admin/keys"):
        assert (await app.get(path, **named)).status == 403, "a user of an admin's key is none"
    assert (await app.get("/v1/snapshot", **named)).json["server"]["admin"] is False


def test_a_name_that_is_no_word_is_hashed_and_stays_apart() -> None:
    tenants = Tenants(bytes(16), [LINE])
    ui = tenants.authenticate(KEY)
    users = [tenants.user(ui, x) for x in ("a/b", "a b", "\udcff", "é", "x" * 999, "a@b.org")]
    assert len({x.name for x in users} | {x.salt for x in users}) == 12
    assert users[-1].name == "ui/a@b.org"
    assert all(x.name.isascii() and len(x.name) < 80 for x in users)


def test_a_user_who_goes_by_the_hash_of_anothers_name_is_not_that_one() -> None:
    tenants = Tenants(bytes(16), [LINE])
    ui = tenants.authenticate(KEY)
    shown = tenants.user(ui, "joe+work@example.com").name.partition("/")[2]
    for name in (shown, shown.removeprefix("~")):
        assert tenants.user(ui, name).salt != tenants.user(ui, "joe+work@example.com").salt


@pytest.mark.parametrize("name", ["X OpenWebUI", "x:y", "x" * 65])
def test_the_setting_is_a_headers_name(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"trust_user_header": name}, GatewayConfig)


def test_no_number_of_users_grows_what_is_kept_of_them() -> None:
    tallies, chats = Tallies(lambda: 0.0), KnownChats(9)
    for i in range(20_000):
        tenant = Tenant(f"ui/{i}", b"s" * 32)
        assert tallies.counting(tenant.name)[1] is tallies.shown(tenant.name)
        chats.identify(tenant, [Link(b"d" * 16, 9, True)], none_known)
    assert len(tallies.names()) == MAX_TALLIES
    assert len(chats._heads_of) <= MAX_TENANTS


def test_all_users_together_have_no_more_chats_than_one_table_of_sessions() -> None:
    chats, latest = KnownChats(50, 100), Tenant("ui/latest", b"s" * 32)
    for i in range(400):
        for tenant in (Tenant(f"ui/{i // 20}", b"s" * 32), latest):
            link = Link(i.to_bytes(16), 9, True)
            named = chats.identify(tenant, [link], none_known)
            assert chats.identify(tenant, [link], none_known) == named
            assert len(chats) <= 100
    assert len(chats) > 70, "only those quiet for longest were forgotten"
