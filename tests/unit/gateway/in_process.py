"""The app without sockets: an engine that records its requests, and direct ASGI calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from benchmarks.stacks.constants import configured
from engines.base import SAVE_S, Demoted, EngineUnavailable, SessionRef, TierName, Upstream
from engines.wire import CodecReport, EngineReport, Notice, SessionReport, Welcome
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.edge.key_list import lines_of
from gateway.gateway import Gateway
from gateway.keys import Limits, Tenants
from gateway.models import ServedModel
from gateway.stored.stored import Stored
from gateway.watch.metrics import Metrics
from scheduler.config import SchedulerConfig
from scheduler.sessions import SessionManager

MODEL = "org/model-1"
WELCOME = Welcome(
    engine="recording",
    engine_version="1",
    model=MODEL,
    max_context=100,
    codec=CodecReport(name="raw"),
    hibernation=True,
)


@dataclass
class Asked:
    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]


class Answered:
    """An ``Upstream`` with a body that is there at once."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._body

    async def read(self) -> bytes:
        return self._body


def json_answer(body: Any, status: int = 200) -> Answered:
    return Answered(status, {"content-type": "application/json"}, json.dumps(body).encode())


def chat_answer(
    text: str | None = "yo", ending: str = "stop", usage: Any = None, **message: Any
) -> Answered:
    """An engine's whole answer to a chat, with one choice."""
    said = {"role": "assistant", "content": text, **message}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL}
    choice = {"index": 0, "message": said, "finish_reason": ending}
    usage = usage or {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return json_answer({**head, "choices": [choice], "usage": usage})


def streamed(text: str = "yo", ending: bytes = b"data: [DONE]\n\n") -> Answered:
    """An engine's answer to a chat in pieces; ``ending`` comes after the last chunk."""
    said = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    over = {"index": 0, "delta": {}, "finish_reason": "stop"}
    chunks = [b"data: " + json.dumps({"choices": [x]}).encode() + b"\n\n" for x in (said, over)]
    return Answered(200, {"content-type": "text/event-stream"}, b"".join(chunks) + ending)


@dataclass
class RecordingEngine:
    """Knows no sessions. Every request gets ``answer``."""

    answer: Upstream = field(default_factory=lambda: json_answer({}))
    welcome: Welcome | None = WELCOME
    asked: list[Asked] = field(default_factory=list)

    @property
    def codec(self) -> CodecReport | None:
        return self.welcome.codec if self.welcome else None

    @property
    def ready(self) -> bool:
        return self.welcome is not None

    @property
    def trouble(self) -> str:
        return "" if self.ready else "it is having a rest"

    async def start(self) -> None:
        pass

    def restart(self, why: str) -> None:
        raise AssertionError(why)

    async def stop(self, drain_s: float, save_s: float = SAVE_S) -> None:
        self.welcome = None

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float | None = None
    ) -> AsyncIterator[Upstream]:
        if not self.ready:
            raise EngineUnavailable(self.trouble)
        self.asked.append(Asked(path, json.loads(body), headers))
        yield self.answer

    def session_headers(self, session: SessionRef) -> dict[str, str]:
        return {"x-session": session.id, "x-tenant": session.tenant, "x-salt": session.salt.hex()}

    def prepare_body(self, body: dict[str, object], session: SessionRef) -> dict[str, object]:
        return body

    async def demote(self, session: SessionRef, tier: TierName | None = None) -> Demoted:
        return Demoted(None, None)

    async def prefetch(self, session: SessionRef) -> SessionReport | None:
        return None

    async def pin(self, session: SessionRef, pinned: bool) -> SessionReport | None:
        return None

    async def forget(self, session: SessionRef) -> SessionReport | None:
        return None

    async def sessions(self) -> list[SessionReport]:
        return []

    async def stats(self) -> EngineReport:
        raise EngineUnavailable("no figures")

    async def notices(self) -> AsyncIterator[Notice | None]:
        yield None
        await asyncio.Event().wait()


@dataclass
class HoldingEngine(RecordingEngine):
    """Has every body, and says nothing until ``going_on``."""

    going_on: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes, headers: Mapping[str, str], wait_s: float | None = None
    ) -> AsyncIterator[Upstream]:
        async with super().open(path, body, headers, wait_s) as upstream:
            await self.going_on.wait()
            yield upstream


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)


class App:
    """The app around a ``RecordingEngine``.

    Keyword arguments are the gateway's settings and constants, and the usual limits of keys.
    """

    def __init__(
        self,
        engine: RecordingEngine | None = None,
        scheduler: SchedulerConfig | None = None,
        stored: Stored | None = None,
        **settings: Any,
    ) -> None:
        self.engine = engine or RecordingEngine()
        self.address: tuple[str, int | None] = ("127.0.0.1", 8080)  # where requests come in
        self.memory: int | None = None  # free bytes of the machine
        if limits := [f"{x}={settings.pop(x)}" for x in Limits._fields if x in settings]:
            settings["key_limits"] = " ".join(limits)
        config = configured(GatewayConfig, **settings)
        tenants = Tenants(b"a secret of the tests", *lines_of(config))
        metrics = Metrics()
        self.sessions = SessionManager(
            self.engine,
            scheduler or SchedulerConfig(),
            salt_of=tenants.salt_of,
            observer=metrics,
            memory=lambda: self.memory,
        )
        self.model = ServedModel(self.engine, self.sessions, config, metrics)
        made = create_app(config, [self.model], tenants, metrics, stored)
        self.gateway: Gateway = made.state.gateway
        self.app: ASGIApp = made

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.call("GET", path, b"", headers)

    async def post(self, path: str, body: Any = None, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.call("POST", path, data, {"content-type": "application/json", **headers})

    async def chat(self, text: str = "hi", **fields: Any) -> Reply:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def call(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        leaves: asyncio.Event | None = None,
        reads: asyncio.Event | None = None,
    ) -> Reply:
        """``_`` in headers' names stands for ``-``.

        The client goes when ``leaves`` is set, and takes the body only while ``reads`` is.
        """
        given = {k.replace("_", "-"): v for k, v in headers.items()}
        if body:
            given.setdefault("content-length", str(len(body)))
        scope = self.scope(method, path, given)
        return await _collect(self.app, scope, body, leaves or asyncio.Event(), reads)

    def scope(self, method: str, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
        """What a server gives the app of a request's head."""
        given = {"host": "localhost", **headers}
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path.partition("?")[0],
            "raw_path": path.partition("?")[0].encode(),
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "headers": [(k.encode(), v.encode("latin-1")) for k, v in given.items() if v],
            "client": ("127.0.0.1", 1),
            "server": self.address,
        }


async def _collect(
    app: ASGIApp,
    scope: dict[str, Any],
    body: bytes,
    leaves: asyncio.Event,
    reads: asyncio.Event | None,
) -> Reply:
    pieces = [body[i : i + 65536] for i in range(0, len(body), 65536)] or [b""]
    reply = Reply(0, {}, b"")

    async def receive() -> Message:
        if not pieces:
            await leaves.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            names = [name for name, _ in message["headers"]]
            assert len(set(names)) == len(names), f"a header was sent twice: {names}"
            reply.headers = {k.decode(): v.decode("latin-1") for k, v in message["headers"]}
        else:
            if reads is not None and not leaves.is_set():
                await reads.wait()
            reply.body += message.get("body", b"")

    await app(scope, receive, send)
    return reply
