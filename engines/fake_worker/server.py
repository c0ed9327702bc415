"""The fake engine's data plane: OpenAI's completions over HTTP, with faults on demand."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from hmac import compare_digest
from zlib import crc32

import msgspec
from aiohttp import web

from engines.fake_worker.echo_answer import EchoAnswer, Script, prompt_words, read_script
from engines.fake_worker.fake_sessions import FakeSessions
from engines.http import CACHE_HEADER, PROMPT_HEADER, CacheOutcome, session_from
from engines.openai.errors import context_too_long
from engines.openai.messages import Sight
from engines.openai.requests import (
    TOKENIZE_PATH,
    ChatRequest,
    CompletionRequest,
    InvalidRequest,
    Json,
    parse_json,
    validate_chat,
    validate_completion,
    validate_tokenize,
)
from engines.wire import SessionRef

MAX_BODY_BYTES = 64 << 20
NO_SESSION = SessionRef(tenant="", id="", salt=b"")  # the session of requests that name none
Validate = Callable[[Json, Sight], ChatRequest | CompletionRequest]
_ALL = Sight(sees=True, fetches=True)  # which images are taken, the gateway has checked


class DataServer:
    """Serves chat and text completions on a unix socket, to callers that know the token."""

    def __init__(self, token: str, model: str, max_context: int, sessions: FakeSessions) -> None:
        self._bearer = f"Bearer {token}".encode()
        self._model = model
        self._max_context = max_context
        self._sessions = sessions

    async def serve(self, path: str) -> web.AppRunner:
        """Listen at a unix socket; returns at once."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_post(TOKENIZE_PATH, self._tokenize)
        # A client that goes away ends its request here at once, also while nothing is written.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.UnixSite(runner, path).start()
        return runner

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, validate_chat)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, validate_completion)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        if not self._knows_token(request):
            return web.Response(status=401)
        try:
            asked = validate_tokenize(parse_json(await request.read()), _ALL)
        except InvalidRequest as error:
            return _json(error.body(), error.status)
        words = prompt_words(asked) if isinstance(asked, ChatRequest) else asked.prompt.split()
        ids = [crc32(word.encode()) for word in words]
        return _json({"count": len(ids), "max_model_len": self._max_context, "tokens": ids}, 200)

    def _knows_token(self, request: web.Request) -> bool:
        return compare_digest(request.headers.get("authorization", "").encode(), self._bearer)

    async def _serve(self, request: web.Request, validate: Validate) -> web.StreamResponse:
        if not self._knows_token(request):
            return web.Response(status=401)
        try:
            raw = parse_json(await request.read())
            script, asked = read_script(raw), validate(raw, _ALL)
            answer = EchoAnswer(asked, script, self._model)
            if len(answer.prompt) >= self._max_context:
                raise context_too_long(self._max_context, len(answer.prompt), "messages")
        except InvalidRequest as error:
            return _json(error.body(), error.status)
        await asyncio.sleep(script.head_s)
        if script.fault == "plain-500":
            return web.Response(status=500, text="Internal Server Error")
        if script.fault == "error-400":
            return _json(InvalidRequest("not like this", "messages").body(), 400)
        return await self._turn(request, answer, script, bool(asked.stream))

    async def _turn(
        self, request: web.Request, answer: EchoAnswer, script: Script, stream: bool
    ) -> web.StreamResponse:
        ref = session_from(request.headers) or NO_SESSION
        cache = self._sessions.begin(ref, answer.prompt)
        try:
            if stream:
                return await self._stream(request, answer, script, cache)
            if script.fault:
                await _misbehave(script, request)
            await asyncio.sleep(script.delay_s * len(answer.answer_words()))
            return _json(answer.whole(cache.cached_tokens), 200, _head(answer, cache))
        finally:
            self._sessions.end(ref, answer.all_words())

    async def _stream(
        self, request: web.Request, answer: EchoAnswer, script: Script, cache: CacheOutcome
    ) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream", **_head(answer, cache)}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        events = answer.events(cache.cached_tokens)
        if script.fault == "bytes":
            events = (bytes([x]) for event in events for x in event)
        for i, event in enumerate(events):
            if script.fault and i == script.after:
                last = await _misbehave(script, request, response, event)
                if last:
                    break
            await asyncio.sleep(script.delay_s)  # also with 0: other tasks get a turn
            await response.write(event)
        await response.write_eof()
        return response


def _head(answer: EchoAnswer, cache: CacheOutcome) -> dict[str, str]:
    return {CACHE_HEADER: cache.header(), PROMPT_HEADER: str(len(answer.prompt))}


async def _misbehave(
    script: Script,
    request: web.Request,
    response: web.StreamResponse | None = None,
    event: bytes = b"",
) -> bool:
    """Commit the fault of the script. Returns True if the answer ends here."""
    if script.fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if script.fault == "hang":
        await asyncio.Event().wait()
    if script.fault == "cut":
        if response is not None:
            await response.write(event[: len(event) // 2])
        if request.transport is not None:
            request.transport.close()
    if response is not None and script.fault == "garbage":
        await response.write(b"\x00\xff\xfe not an event\n\ndata: {half\n\n")
    if response is not None and script.fault == "error-event":
        await response.write(b'data: {"error":{"message":"out of memory"}}\n\ndata: [DONE]\n\n')
    return script.fault in ("cut", "no-done", "error-event")


def _json(
    body: dict[str, object], status: int, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )
