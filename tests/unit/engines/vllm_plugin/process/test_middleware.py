"""The middleware of vLLM's HTTP server, with an application and a hub of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.http import CACHE_HEADER, PATIENCE_HEADER
from engines.vllm_plugin.config import PluginSettings, write_settings
from engines.vllm_plugin.identity import answer_id_of
from engines.vllm_plugin.messages import RequestAdmitted, Wake
from engines.vllm_plugin.process import middleware as middleware
from engines.vllm_plugin.process.middleware import CacheHeaderMiddleware
from engines.wire import frame
from kvstore.config import StoreConfig

HEADER = CACHE_HEADER.encode()


class FakeHub:
    """Accepts the front and sends the test's reports."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.connected = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        await reader.readexactly(1)  # of the front's hello
        self.connected.set()

    async def report(self, scope: dict[str, Any], cache: str) -> None:
        answer_id = answer_id_of(dict(scope["headers"])[b"x-request-id"].decode())
        await self.connected.wait()
        for writer in self.writers:
            writer.write(frame(RequestAdmitted(answer_id, cache, 70)))


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[FakeHub]:
    """A hub where the settings of ``tmp_path`` say; the front, too, stops listening in the end."""
    hub = FakeHub()
    server = await asyncio.start_unix_server(hub.serve, str(tmp_path / "hub.sock"))
    yield hub
    await asyncio.wait_for(hub.connected.wait(), 10)
    await stop_listening()
    server.close()
    for writer in hub.writers:
        writer.close()


async def stop_listening() -> None:
    """The front listens for as long as its server lives; a test is shorter."""
    for task in [x for x in asyncio.all_tasks() if x.get_name() == "cold-reports"]:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def scope_for(folder: Path, path: str = "/v1/chat/completions") -> dict[str, Any]:
    settings = PluginSettings(store=StoreConfig(), runtime_dir=str(folder), disk_path="", token="t")
    extra = {"settings": str(write_settings(settings))}
    args = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    app = SimpleNamespace(state=SimpleNamespace(args=args))
    headers = [(b"x-request-id", b"the client's"), (b"accept", b"*/*")]
    return {"type": "http", "path": path, "headers": headers, "app": app}


def head(status: int = 200, kind: bytes = b"application/json") -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def never_read() -> dict[str, Any]:
    raise AssertionError("the request must not be read here")


class Sent(list[Any]):
    """Keeps the messages of an application."""

    async def __call__(self, message: Any) -> None:
        self.append(message)


def answering(*messages: Any) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    return app


async def through(app: Any, scope: dict[str, Any]) -> list[Any]:
    sent = Sent()
    await CacheHeaderMiddleware(app)(scope, never_read, sent)
    return sent


async def test_a_whole_answer_says_where_its_kv_came_from(hub, tmp_path):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await hub.report(scope, "cold-disk; tokens=64")
        await asyncio.sleep(0.05)
        await send(head())
        await send(body(b"{}"))

    start, rest = await through(app, scope_for(tmp_path))
    assert (HEADER, b"cold-disk; tokens=64") in start["headers"]
    assert (b"x-thermocline-prompt", b"70") in start["headers"]
    assert rest == body(b"{}")


async def test_a_report_may_be_a_moment_late(hub, tmp_path):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(head())
        late = asyncio.create_task(hub.report(scope, "hot; tokens=32"))
        await send(body(b"{}"))
        await late

    start, _ = await through(app, scope_for(tmp_path))
    assert (HEADER, b"hot; tokens=32") in start["headers"]


async def test_a_streams_head_goes_out_with_the_report_not_with_the_first_token(hub, tmp_path):
    seen = Sent()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(head(kind=b"text/event-stream; charset=utf-8"))
        assert not seen  # held back: the outcome is not known yet
        await hub.report(scope, "miss; tokens=0")
        while not seen:
            await asyncio.sleep(0.005)
        await send(body(b"data: 1\n\n", more=True))
        await send(body(b"data: [DONE]\n\n"))

    await CacheHeaderMiddleware(app)(scope_for(tmp_path), never_read, seen)
    assert [x["type"].rpartition(".")[2] for x in seen] == ["start", "body", "body"]
    assert (HEADER, b"miss; tokens=0") in seen[0]["headers"]


async def test_a_long_prefill_shows_signs_of_life(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(middleware, "KEEP_ALIVE_S", 0.02)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(head(kind=b"text/event-stream"))
        await hub.report(scope, "miss; tokens=0")
        await asyncio.sleep(0.2)
        await send(body(b"data: 1\n\n"))
        await asyncio.sleep(0.1)

    sent = await through(app, scope_for(tmp_path))
    assert sent[0]["type"] == "http.response.start"
    assert sent[1]["body"] == b": prefill\n\n"
    assert sent[-1] == body(b"data: 1\n\n")  # and none after the first token


async def test_without_a_hub_answers_only_lack_the_header(tmp_path):
    start, rest = await through(answering(head(), body(b"{}")), scope_for(tmp_path))
    await stop_listening()
    assert HEADER not in dict(start["headers"])
    assert rest == body(b"{}")


async def test_errors_are_not_held_up(hub, tmp_path):
    async with asyncio.timeout(0.2):
        start, _ = await through(answering(head(status=400), body(b"no")), scope_for(tmp_path))
    assert start["status"] == 400


async def test_an_application_that_fails_leaves_nothing_running(hub, tmp_path):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(head(kind=b"text/event-stream"))
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        await through(app, scope_for(tmp_path))


async def test_other_paths_pass_through_untouched(tmp_path):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (b"x-request-id", b"the client's") in scope["headers"]
        await send(head())
        await send(body(b"ok"))

    assert await through(app, scope_for(tmp_path, "/health")) == [head(), body(b"ok")]


async def test_the_hub_hears_of_the_server_before_any_request(hub, tmp_path):
    """The hub may then report to the gateway that the engine is ready."""
    begun = {"type": "lifespan.startup.complete"}
    assert await through(answering(begun), {**scope_for(tmp_path), "type": "lifespan"}) == [begun]
    async with asyncio.timeout(10):
        await hub.connected.wait()


async def with_patience(app: Any, folder: Path, patience_s: float) -> list[Any]:
    front, scope = CacheHeaderMiddleware(app), scope_for(folder)
    front._reports.start(str(folder / "hub.sock"), None)
    while not front._reports.connected:
        await asyncio.sleep(0.01)
    scope["headers"].append((PATIENCE_HEADER.encode(), str(patience_s).encode()))
    sent = Sent()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async with asyncio.timeout(10):
        await front(scope, receive, sent)
    return sent


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_request_that_waits_too_long_in_the_line_is_asked_to_come_back(
    hub, tmp_path, streamed
):
    """vLLM hears that the client is gone, so that the request does not run without a client."""
    gone = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if streamed:
            await send(head(kind=b"text/event-stream"))
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        await send(body(b"too late"))

    start, rest = await with_patience(app, tmp_path, 0.05)
    assert start["status"] == 429 and (b"retry-after", b"1") in start["headers"]
    assert b"engine_overloaded" in rest["body"] and gone.is_set()


async def test_who_runs_in_time_is_not_hurried(hub, tmp_path):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await hub.report(scope, "hot; tokens=1")
        await asyncio.sleep(0.5)  # longer than it may wait in line
        await send(head())
        await send(body(b"{}"))

    sent = await with_patience(app, tmp_path, 0.3)
    assert [x.get("status") for x in sent] == [200, None]


async def test_an_idle_engine_is_woken_by_a_question_and_a_failure_of_it_ends_nothing(
    hub, tmp_path
):
    asked = asyncio.Queue[None]()

    class Client:
        async def is_sleeping(self) -> bool:
            asked.put_nowait(None)
            raise RuntimeError("the engine is on its way out")

    middleware.AdmissionReports().start(str(tmp_path / "hub.sock"), Client())
    await hub.connected.wait()
    for _ in range(2):
        hub.writers[0].write(frame(Wake()))
        await asyncio.wait_for(asked.get(), 10)
