"""The outermost middleware: ids, guards, limits and the shapes of refusals."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from importlib.metadata import version

import pytest

from gateway.keys import generate_key
from scheduler.config import SchedulerConfig
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine, Reply
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def test_every_answer_has_an_id_and_a_time(app: App) -> None:
    for reply in (await app.get("/livez"), await app.get("/nowhere"), await app.chat()):
        assert re.fullmatch(r"req_[0-9a-f]{24}", reply.headers["x-request-id"])
        assert int(reply.headers["openai-processing-ms"]) >= 0


async def test_a_clients_request_id_is_kept_where_it_is_sane(app: App) -> None:
    assert (await app.get("/livez", x_request_id="abc-1:2")).headers["x-request-id"] == "abc-1:2"
    for bad in ("a b", "x" * 200, "a\r\nset-cookie: y", "\u00e9", "-x"):
        assert (await app.get("/livez", x_request_id=bad)).headers["x-request-id"] != bad
    await app.post(CHAT, BODY, x_request_id="trace-7")
    assert app.engine.asked[0].headers["x-request-id"] == "trace-7"


async def test_health_checks_need_no_host(app: App) -> None:
    for path in ("/livez", "/readyz", "/health", "/ping"):
        assert (await app.get(path, host="")).status in (200, 503)
    for path in ("/v1/models", "/metrics", "/ui"):
        assert (await app.get(path, host="")).error["code"] == "host_missing"


async def test_paths_and_methods_that_do_not_exist(app: App) -> None:
    assert (await app.get("/v1/nope")).error["code"] == "not_found"
    for path, allowed in (
        ("/v1/completions", "POST"),
        ("/v1/conversations/x", "DELETE, GET, POST"),
        ("/v1/responses/x", "DELETE, GET"),
    ):
        reply = await app.call("PUT", path, b"", {})
        assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
        assert reply.headers["allow"] == allowed


async def test_a_slash_at_the_end_and_head_change_nothing(app: App) -> None:
    assert (await app.get("/v1/models/")).json == (await app.get("/v1/models")).json
    assert (await app.get("/livez//")).status == 200
    for path, status in (("/livez", 200), ("/v1/models", 200), ("/nope", 404)):
        assert (await app.call("HEAD", path, b"", {})).status == status
    assert (await app.get("/v1/models/a/")).error["message"].count("'a/'") == 1


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_by_other_names(app: App, path: str) -> None:
    assert (await app.get(path)).status == (await app.get("/readyz")).status
    app.engine.welcome = None
    assert (await app.get(path)).status == 503


async def test_the_version() -> None:
    assert (await App().get("/version")).json == {"version": version("thermocline")}


async def test_other_names_are_refused_on_loopback_only() -> None:
    for host in ("localhost", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST:1"):
        assert (await App().get("/livez", host=host)).status == 200
    assert (await App().get("/livez", host="evil.example")).status == 403
    assert (await App().get("/version", host="")).status == 400
    with_keys = App(host="0.0.0.0", api_keys=(generate_key("alice")[1],))
    assert (await with_keys.get("/livez", host="box.lan")).status == 200
    app = App(allowed_hosts=("box.lan",))
    for host in ("box.lan:80", "localhost", "10.1.2.3:8080", "[fd00::5]"):
        assert (await app.get("/livez", host=host)).status == 200
    for host in ("evil.example", "box", "10.1.2.3.evil.example"):
        assert (await app.get("/livez", host=host)).status == 403


async def test_on_the_admins_socket_any_name_will_do_and_pages_are_refused_still() -> None:
    app = App(allowed_hosts=("box.lan",), admin_socket="/run/admins")
    app.address = ("/run/admins", None)
    assert (await app.get("/livez", host="any.example")).status == 200
    assert (await app.post(CHAT, BODY, origin="https://evil.example")).status == 403
    app.address = ("/run/other", None)
    assert (await app.get("/livez", host="any.example")).status == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("192.168.1.5:8080", 200),
        ("[fd00::5]:8080", 200),
        ("gpubox:8080", 200),
        ("localhost", 200),
        ("evil.example", 403),
        ("192.168.1.5.evil.example:8080", 403),
    ],
)
async def test_without_keys_a_foreign_name_is_refused_everywhere(host: str, status: int) -> None:
    """A page may let its own name point to an address in the reader's network."""
    assert (await App(host="0.0.0.0").get("/livez", host=host)).status == status


async def test_a_browser_that_asks_for_a_foreign_page_gets_the_reason() -> None:
    ask = {"origin": "https://ui.example", "access_control_request_method": "POST"}
    for app in (App(), App(allowed_origins=("https://other.example",))):
        reply = await app.call("OPTIONS", CHAT, b"", ask)
        assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
        assert "gateway.allowed_origins" in reply.error["message"]
    reply = await App(allowed_origins=("https://ui.example",)).call("OPTIONS", CHAT, b"", ask)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "https://ui.example"


async def test_pages_of_other_origins_cannot_post(app: App) -> None:
    for origin in ("https://evil.example", "null", "http://localhost:9"):
        reply = await app.post(CHAT, BODY, origin=origin)
        assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")
    assert app.engine.asked == []
    assert (await app.post(CHAT, BODY, origin="http://localhost")).status == 200  # its own page
    allowed = App(allowed_origins=("https://ui.example",))
    reply = await allowed.post(CHAT, BODY, origin="https://ui.example")
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "https://ui.example"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"content_type": ""}, 415),
        ({"content_encoding": "br"}, 415),
        ({"content_length": "999999999"}, 413),
        ({"content_type": "application/json; charset=utf-8"}, 200),
    ],
)
async def test_bodies_that_are_not_read(headers: dict[str, str], status: int) -> None:
    given = {"content_type": "application/json", **headers}
    data = json.dumps(BODY).encode()
    assert (await App().call("POST", CHAT, data, given)).status == status


async def test_a_body_without_a_length_is_counted_while_it_comes() -> None:
    app = App(max_body_bytes=100_000)
    big = {**BODY, "padding": "x" * 200_000}
    reply = await app.post(CHAT, big, content_length="", transfer_encoding="chunked")
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


async def test_log_lines_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await App().get("/v1/%0aFAKE%1b[31m", x_request_id="a\nb")
    (line,) = [x.getMessage() for x in caplog.records if "GET" in x.getMessage()]
    assert line.isprintable() and "404" in line


async def ready_once_settled(app: App) -> Reply:
    following = asyncio.create_task(app.sessions.run())
    await eventually(lambda: app.sessions.settled)
    following.cancel()
    return await app.get("/readyz")


async def test_health() -> None:
    engine = RecordingEngine()
    app = App(engine)
    assert (await app.get("/livez")).status == 200
    early = await app.get("/readyz")
    assert (early.status, early.error["code"]) == (503, "engine_unavailable")
    ready = await ready_once_settled(app)
    assert (ready.status, ready.json["model"]) == (200, MODEL)
    engine.welcome = None
    assert (await app.get("/livez")).status == 200
    away = await app.get("/readyz")
    assert (away.status, away.error["message"]) == (503, "it is having a rest")


async def test_scarce_memory_refuses_turns_and_says_so() -> None:
    marks = SchedulerConfig(memory_low_bytes=1000)
    app = App(scheduler=marks)
    app.memory = 599
    refused = await app.chat()
    assert (refused.status, refused.error["code"]) == (503, "memory_scarce")
    assert refused.headers["retry-after"] == "5"
    assert app.engine.asked == []
    ready = await ready_once_settled(app)
    assert (ready.status, ready.error["code"]) == (503, "memory_scarce")
    assert (await app.get("/livez")).status == 200
    metrics = (await app.get("/metrics")).body
    assert b"thermocline_memory_available_bytes 599.0" in metrics
    assert b'thermocline_decisions_total{decision="refused-memory"} 1.0' in metrics


async def test_models() -> None:
    app = App(model_aliases=("gpt-x",))
    listed = (await app.get("/v1/models")).json
    assert [x["id"] for x in listed["data"]] == [MODEL, "gpt-x"]
    assert (await app.get(f"/v1/models/{MODEL}")).json == listed["data"][0]
    assert (await app.get("/v1/models/other")).error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({}, 200),
        ({"host": "0.0.0.0"}, 401),
        ({"host": "0.0.0.0", "metrics_access": "open"}, 200),
        ({"metrics_access": "key"}, 401),
    ],
)
async def test_who_may_read_metrics(settings: dict[str, str], status: int) -> None:
    _, line = generate_key("alice")
    app = App(api_keys=(line,), **settings)
    assert (await app.get("/metrics")).status == status


async def test_metrics_count_answers_by_route_and_not_by_path(app: App) -> None:
    await app.chat(session_id="a secret name")
    await app.get("/v1/sessions/a-secret-name")
    await app.get("/some/path")
    text = (await app.get("/metrics")).body.decode()
    assert 'route="chat_completions",status="200"' in text
    assert 'route="show_session",status="404"' in text
    assert 'route="other",status="404"' in text
    assert "secret" not in text and "/some/path" not in text
