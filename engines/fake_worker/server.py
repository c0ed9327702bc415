"""Serves the fake engine's data plane: OpenAI's completions over HTTP, with faults on demand.

An answer repeats the question, in OpenAI's shapes. A request may have a script, which sets the
speed, the length and a fault of its answer: words ``key=value`` in OpenAI's ``metadata`` field:

    {"metadata": {"fake": "chunks=200 delay_s=0.01 fault=die after=3"}}
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from hmac import compare_digest
from typing import Annotated, Any, Literal, TypeAlias
from zlib import crc32

import msgspec
from aiohttp import web

from engines.fake_worker.fake_sessions import FakeSessions
from engines.http import CACHE_HEADER, PROMPT_HEADER, CacheOutcome, session_from
from engines.openai.errors import context_too_long
from engines.openai.messages import ImageSupport, Message
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

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Fault: TypeAlias = Literal[
    "",
    "die",  # SIGKILL to itself
    "cut",  # the connection is closed inside an event
    "hang",  # no more bytes are sent
    "no-done",  # a clean end without [DONE]
    "garbage",  # bytes that are not events
    "error-event",  # the engine reports an error in the stream, and ends it
    "plain-500",  # an error that is not in OpenAI's shape
    "error-400",
    "bytes",  # the stream comes byte by byte
]
MAX_BODY_BYTES = 64 << 20
NO_SESSION = SessionRef(tenant="", id="", salt=b"")  # the session of requests that name none
Validate = Callable[[Json, ImageSupport], ChatRequest | CompletionRequest]
_ALL = ImageSupport(sees=True, fetches=True)  # the gateway has checked the images
CREATED = 1_700_000_000  # constant, so that answers are reproducible
IMAGE = "<image>"
DONE = b"data: [DONE]\n\n"


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The behaviour that one request asks for."""

    chunks: Count | None = None  # words in the answer; None = as many as in the echo
    head_s: Seconds = 0.0  # before the response head
    delay_s: Seconds = 0.0  # before every chunk
    after: Count = 0  # chunks that are sent before the fault
    fault: Fault = ""


def read_script(raw: dict[str, Any]) -> Script:
    """Read the script in a request's body. Raises ``InvalidRequest`` for a misspelt one."""
    metadata = raw.get("metadata")
    words = metadata.get("fake", "") if isinstance(metadata, dict) else ""
    pairs = dict(word.partition("=")[::2] for word in str(words).split())
    try:
        return msgspec.convert(pairs, Script, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"metadata.fake: {error}", "metadata") from error


class EchoAnswer:
    """One answer, which repeats the question; as a stream or whole."""

    def __init__(
        self, request: ChatRequest | CompletionRequest, script: Script, model: str
    ) -> None:
        self._request = request
        self._model = model
        self.prompt = prompt_words(request)
        # By the prompt: ids are reproducible, and answers to other prompts are stored apart.
        digest = blake2b(" ".join(self.prompt).encode("utf-8", "replace"), digest_size=8)
        self._id = f"fake-{digest.hexdigest()}"
        self._chat = isinstance(request, ChatRequest)
        wanted = script.chunks if script.chunks is not None else len(self._echo())
        limit = request.answer_tokens if isinstance(request, ChatRequest) else request.max_tokens
        self._num_chunks = wanted if limit is None else min(wanted, limit)
        self._finish = "stop" if self._num_chunks == wanted else "length"

    def answer_words(self) -> list[str]:
        """List the answer's words, each with the blank before it."""
        echo = self._echo()
        words = [echo[i % len(echo)] for i in range(self._num_chunks)]
        return [word if i == 0 else f" {word}" for i, word in enumerate(words)]

    def all_words(self) -> list[str]:
        """List the words of prompt and answer: the tokens that the session holds afterwards."""
        return [*self.prompt, "assistant:", *(x.strip() for x in self.answer_words())]

    def events(self, cached: int) -> Iterator[bytes]:
        """Yield the SSE events: one per word and choice, then finish, usage and [DONE]."""
        for index in range(self._request.num_choices):
            for i, word in enumerate(self.answer_words()):
                yield _sse(self._chunk([self._delta(index, word, first=i == 0)]))
            yield _sse(self._chunk([self._delta(index, None, first=False)]))
        if self._request.include_usage:
            yield _sse({**self._chunk([]), "usage": self._usage(cached)})
        yield DONE

    def whole(self, cached: int) -> dict[str, Any]:
        """Make the answer's JSON; ``cached`` tokens of the prompt were reused."""
        choices = [self._choice(i) for i in range(self._request.num_choices)]
        return {**self._envelope(""), "choices": choices, "usage": self._usage(cached)}

    def _choice(self, index: int) -> dict[str, Any]:
        text = "".join(self.answer_words())
        said: dict[str, Any] = {"text": text}
        if self._chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **said, "logprobs": None, "finish_reason": self._finish}

    def _delta(self, index: int, word: str | None, first: bool) -> dict[str, Any]:
        said: dict[str, Any] = {"text": word or ""}
        if self._chat:
            delta = {} if word is None else {"content": word}
            said = {"delta": {"role": "assistant", **delta} if first else delta}
        finish = self._finish if word is None else None
        return {"index": index, **said, "logprobs": None, "finish_reason": finish}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._envelope(".chunk"), "choices": choices}
        return {**chunk, "usage": None} if self._request.include_usage else chunk

    def _envelope(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._chat else "text_completion"
        return {"id": self._id, "object": kind, "created": CREATED, "model": self._model}

    def _usage(self, cached: int) -> dict[str, Any]:
        answered = self._num_chunks * self._request.num_choices
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": answered,
            "total_tokens": len(self.prompt) + answered,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _echo(self) -> list[str]:
        if isinstance(self._request, ChatRequest):
            asked = _words(self._request.messages[-1])
        else:
            asked = " ".join(self.prompt).split()
        return ["You", "said:", *asked]


def prompt_words(request: ChatRequest | CompletionRequest) -> list[str]:
    """Split a prompt into the fake engine's tokens."""
    if isinstance(request, ChatRequest):
        return [
            word for message in request.messages for word in (f"{message.role}:", *_words(message))
        ]
    return [word for prompt in request.prompts for word in _split(prompt)] or [""]


def _words(message: Message) -> list[str]:
    """The words of a message, in order; one for each image."""
    if not isinstance(message.content, list):
        return message.text.split()
    return [
        word
        for part in message.content
        for word in ([IMAGE] if part.image_url else (part.body or "").split())
    ]


def _split(prompt: str | Sequence[int]) -> list[str]:
    return prompt.split() if isinstance(prompt, str) else [str(x) for x in prompt]


def _sse(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


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
        # If a client leaves, aiohttp cancels its handler at once, also while none of it is written.
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
            await asyncio.sleep(script.delay_s)  # with 0, other tasks still run
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
    """Cause the script's fault; return True if the answer ends here."""
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
