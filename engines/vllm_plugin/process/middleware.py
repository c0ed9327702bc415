"""The middleware of vLLM's HTTP server: adds the cache header, and limits waits and grammars.

    --middleware engines.vllm_plugin.process.middleware.CacheHeaderMiddleware

The middleware puts an answer id into every request's id. When vLLM's scheduler begins to run the
request, the scheduler side of the plug-in reports that answer id with the value of the cache
header; until then the middleware holds back the head of the answer. It refuses a request that has
not begun within the time that the gateway gave it. While a long prompt is prefilled, it sends
comments in a stream as keep-alives, as our other engines do.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from engines.host.work_line import QueueFull
from engines.http import CACHE_HEADER, PROMPT_HEADER, TENANT_HEADER, patience_from
from engines.log_lines import log_as
from engines.openai.errors import InvalidRequest
from engines.vllm_plugin.config import BadSettings, settings_from
from engines.vllm_plugin.grammar.trial_gate import ClientLeft, GrammarGate
from engines.vllm_plugin.identity import ANSWER_ID_PREFIX, TENANT
from engines.vllm_plugin.measuring.request_runner import RequestRunner
from engines.vllm_plugin.messages import (
    FrontHello,
    RequestAdmitted,
    RunForward,
    Wake,
    decode_to_front,
)
from engines.wire import WireError, frame, read_body

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

RETRY_AFTER_S: Final = 1
# vLLM notices a client's departure by a disconnect message or by the cancellation of the task that
# serves the request. If the message has not ended the task after this long, the task is cancelled.
LEAVE_S: Final = 1.0
logger = logging.getLogger("thermocline.vllm")
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]
PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
KEEP_ALIVE_S: Final = 10.0
# A report and its answer use different sockets, so the report may be a moment late.
LATE_S: Final = 0.25
RETRY_S: Final = 0.5
# The server opens its socket right after the application has reported its start.
LISTEN_S: Final = 0.2
TOO_LATE: Final = "no place in a batch was free in time; try again later"


class Departure:
    """The receiving side of a client's connection, which can report that the client has left."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = asyncio.Event()

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the next message, or a disconnect message after ``end`` was called."""
        coming = asyncio.ensure_future(self._receive())
        going = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({coming, going}, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else {"type": "http.disconnect"}
        finally:
            for task in (coming, going):
                task.cancel()

    async def end(self, serving: asyncio.Task[None]) -> None:
        """Make the application abandon the request; return when it has."""
        self._gone.set()
        await asyncio.wait({serving}, timeout=LEAVE_S)
        serving.cancel()
        with suppress(asyncio.CancelledError, Exception):  # no client is left to get the error
            await serving


async def is_late(
    serving: asyncio.Task[None], begun: asyncio.Future[Any], patience_s: float
) -> bool:
    """Wait until a request runs or ends; return True if neither happens in ``patience_s``."""
    either: set[asyncio.Future[Any]] = {serving, begun}
    done, _ = await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    return not done


def overloaded(message: str) -> InvalidRequest:
    """Return the error for a request that the client should send again later."""
    return InvalidRequest(message, code="engine_overloaded", status=429)


async def refuse(send: Send, error: InvalidRequest) -> None:
    """Answer with an error in OpenAI's shape."""
    body = msgspec.json.encode(error.body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 429:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class AdmissionReports:
    """Receives from the hub which requests begin to run, and wakes the answers that wait for it."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[RequestAdmitted]] = {}
        self._tasks: list[asyncio.Task[None]] = []  # the loop itself keeps only weak references
        self._client: Any = None
        self._runner: RequestRunner  # made by ``start``
        self.connected = False  # if False, it is unknown which requests run

    def start(self, hub_path: str, client: Any, delay_s: float = 0.0) -> None:
        """Connect to the hub, which then knows that this server runs. Later calls do nothing.

        ``client``: vLLM's engine client, for measuring requests.
        """
        if not self._tasks:
            self._client = client
            self._runner = RequestRunner(client)
            self._begin(self._listen(hub_path, delay_s))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks = [x for x in self._tasks if not x.done()]
        self._tasks.append(asyncio.create_task(work))

    def expect(self, answer_id: str) -> asyncio.Future[RequestAdmitted]:
        """Return a future of a request's report, which comes when the request begins to run."""
        report: asyncio.Future[RequestAdmitted] = asyncio.get_running_loop().create_future()
        self._waiting[answer_id] = report
        return report

    def forget(self, answer_id: str) -> None:
        """Stop waiting for the report of a request."""
        self._waiting.pop(answer_id, None)

    async def _listen(self, hub_path: str, delay_s: float) -> None:
        """Receive reports while the server runs; without the hub answers lack the header."""
        await asyncio.sleep(delay_s)
        while True:
            try:
                await self._converse(*await asyncio.open_unix_connection(hub_path))
            except (OSError, EOFError, ValueError, WireError) as error:
                logger.warning("no reports from the engine: %s", error or type(error).__name__)
                await asyncio.sleep(RETRY_S)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(frame(FrontHello()))
            self.connected = True
            while True:
                self._receive(await read_body(reader), writer)
        finally:
            self.connected = False
            writer.close()

    def _receive(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        match decode_to_front(body):
            case Wake():
                self._begin(self._wake())
            case RunForward() as order:
                self._begin(self._run(order, writer))
            case RequestAdmitted() as news:
                report = self._waiting.get(news.answer_id)
                if report is not None and not report.done():
                    report.set_result(news)

    async def _wake(self) -> None:
        """Make an idle engine check for work: any call to it has that effect."""
        with suppress(Exception):  # top level of a task; the engine's next step reports as well
            await self._client.is_sleeping()

    async def _run(self, order: RunForward, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(await self._runner.run(order)))


class CacheHeaderMiddleware:
    """Passes chats and completions to vLLM, and adds the cache header to each answer's head.

    It has the request's grammars tried first, and limits how long a request waits to begin. It is
    pure ASGI, so that streams pass through unchanged.
    """

    def __init__(self, app: App) -> None:
        log_as("vllm")
        self._app = app
        self._reports = AdmissionReports()
        self._gate = GrammarGate()
        self._hub_path: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, partial(self._send_started, scope, send))
            return
        if self._hub_path is None and scope["type"] == "http":
            self._hub_path = _hub_path(scope)
        hub_path = self._hub_path
        if scope["type"] != "http" or scope["path"] not in PATHS or not hub_path:
            await self._app(scope, receive, send)
            return
        self._reports.start(hub_path, _client(scope))
        said = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        answer_id = ANSWER_ID_PREFIX + secrets.token_hex(12)
        try:
            patience_s = patience_from(said)
            TENANT.set(said.get(TENANT_HEADER))
            receive = await self._gate.passed(said.get(TENANT_HEADER, ""), receive)
        except InvalidRequest as error:
            await refuse(send, error)
            return
        except QueueFull as error:
            await refuse(send, overloaded(str(error)))
            return
        except ClientLeft:
            return
        others = [(k, v) for k, v in scope["headers"] if k != b"x-request-id"]
        marked = {**scope, "headers": [*others, (b"x-request-id", answer_id.encode())]}
        answer = _HeldAnswer(send, self._reports.expect(answer_id))
        try:
            await self._serve(marked, receive, answer, patience_s)
        finally:
            self._reports.forget(answer_id)
            await answer.stop_waiting()

    async def _serve(
        self, scope: Scope, receive: Receive, answer: _HeldAnswer, patience_s: float | None
    ) -> None:
        """Let vLLM answer, or refuse the request if it does not begin to run in time."""
        if patience_s is None:
            await self._app(scope, receive, answer.send)
            return
        client = Departure(receive)
        serving = asyncio.create_task(self._app(scope, client.receive, answer.send))
        try:
            late = await is_late(serving, answer.report, patience_s)
            if late and self._reports.connected and await answer.withhold():
                await client.end(serving)
                await refuse(answer.send_past, overloaded(TOO_LATE))
            else:
                await serving
        finally:
            serving.cancel()

    async def _send_started(
        self, scope: Scope, send: Send, message: MutableMapping[str, Any]
    ) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete" and (hub_path := _hub_path(scope)):
            self._reports.start(hub_path, _client(scope), LISTEN_S)
            if (client := _client(scope)) is not None:
                self._gate.begin(client)


class _HeldAnswer:
    """An outgoing answer, whose head waits for the report or for the beginning of the body."""

    def __init__(self, send: Send, report: asyncio.Future[RequestAdmitted]) -> None:
        self.send_past = send  # sends a message without holding it back
        self.report = report
        self._withheld = False
        self._begun = False  # a part of its body has come
        self._head: MutableMapping[str, Any] | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._order = asyncio.Lock()  # held while a message is sent

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self._withheld:
            return
        if message["type"] == "http.response.start":
            self._head = message
            if _is_stream(message):
                self._waiting = asyncio.create_task(self._keep_alive())
            return
        self._begun = True
        await self.stop_waiting()
        if self._head is not None and self._head["status"] == 200:
            with suppress(TimeoutError):
                async with asyncio.timeout(LATE_S):  # not wait_for: it can lose a cancellation
                    await asyncio.shield(self.report)
        await self._send_head()
        await self.send_past(message)

    async def withhold(self) -> bool:
        """Send no part of the answer from now on; False if a part was sent or is being sent."""
        if self._begun:
            return False
        self._withheld = True
        await self.stop_waiting()
        return True

    async def _keep_alive(self) -> None:
        """Send the head once the request runs, then a comment every ``KEEP_ALIVE_S``."""
        await asyncio.wait([self.report])
        await self._send_head()
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            async with self._order:
                await self.send_past(
                    {"type": "http.response.body", "body": b": prefill\n\n", "more_body": True}
                )

    async def _send_head(self) -> None:
        async with self._order:
            head, self._head = self._head, None
            if head is None:
                return
            headers = list(head.get("headers", ()))
            if self.report.done() and not self.report.cancelled():
                news = self.report.result()
                headers.append((CACHE_HEADER.encode(), news.cache.encode()))
                headers.append((PROMPT_HEADER.encode(), b"%d" % news.prompt_tokens))
            await self.send_past({**head, "headers": headers})

    async def stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        async with self._order:  # never in the middle of a message
            waiting.cancel()
        await asyncio.wait([waiting])


def _is_stream(head: Mapping[str, Any]) -> bool:
    headers = {k.lower(): v for k, v in head.get("headers", ())}
    return bytes(headers.get(b"content-type", b"")).startswith(b"text/event-stream")


def _client(scope: Scope) -> Any:
    """Return vLLM's client of its engine, which its server keeps in the application's state."""
    return getattr(getattr(scope.get("app"), "state", None), "engine_client", None)


def _hub_path(scope: Scope) -> str:
    """Return the path of the hub's socket; "" if this server runs without the plug-in.

    It is read from the settings file that vLLM's arguments name.
    """
    args = getattr(getattr(scope.get("app"), "state", None), "args", None)
    transfer = getattr(args, "kv_transfer_config", None)
    extra = (
        transfer.get("kv_connector_extra_config", {})
        if isinstance(transfer, Mapping)
        else getattr(transfer, "kv_connector_extra_config", {})
    )
    try:
        return settings_from(extra).hub_path
    except BadSettings:
        return ""
