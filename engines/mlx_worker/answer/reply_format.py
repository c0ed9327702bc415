"""Writes replies as OpenAI's objects, chunks and server-sent events, for chats and completions.

A streamed response notices at once when its client has disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engines.http import ClientGone, while_client_stays
from engines.mlx_worker.answer.output_processor import (
    Delta,
    ScoredToken,
    ShownReason,
    chat_logprobs,
    joined,
    text_logprobs,
)
from engines.mlx_worker.answer.reply import ChoiceDelta, ChoiceEnd, ReplyStream
from engines.mlx_worker.answer.tool_calls import CallDelta
from engines.mlx_worker.generation import PrefillProgress
from engines.mlx_worker.model.loading import Vocabulary
from engines.openai.requests import ChatRequest, CompletionRequest

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
# Seconds between comments while nothing else is sent, so that no proxy closes the connection.
KEEPALIVE_S = 5.0

_encode = msgspec.json.Encoder().encode
JsonObject: TypeAlias = dict[str, Any]


def sse_event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def sse_comment(text: str) -> bytes:
    """Return an event-stream comment, which every client ignores."""
    return f": {text}\n\n".encode()


class SseResponse(Response):
    """Sends ``chunks`` as they come, and always closes ``closing`` at the end.

    An error in mid-stream becomes a last event, made by ``on_error``, since the status has been
    sent already. ``keepalive_s``: see ``KEEPALIVE_S``.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        headers: Mapping[str, str],
        closing: AsyncExitStack,
        on_error: Callable[[Exception], Mapping[str, Any]],
        keepalive_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]  # Response measured an empty body
        self._chunks = chunks
        self._closing = closing
        self._on_error = on_error
        self._keepalive_s = keepalive_s
        self._last_sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._closing:
            try:
                await while_client_stays(receive, lambda: self._send_all(send))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except (ClientGone, OSError):
                logger.debug("the client left in mid-stream")

    async def _send_all(self, send: Send) -> None:
        """Send all but the final body message, after which ``receive`` reports a disconnect."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        keepalive = asyncio.create_task(self._keep_alive(send))
        try:
            async for chunk in self._chunks:
                await self._send(send, chunk)
        except OSError:
            raise
        except Exception as error:  # the process's edge: the client must see an end
            await self._send(send, sse_event(self._on_error(error)))
        finally:
            keepalive.cancel()
            await asyncio.gather(keepalive, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._keepalive_s)
            if time.monotonic() - self._last_sent >= self._keepalive_s:
                await self._send(send, sse_comment("keepalive"))

    async def _send(self, send: Send, chunk: bytes) -> None:
        self._last_sent = time.monotonic()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


@dataclass(frozen=True)
class AnsweringModel:
    """The model that answers, as replies name it."""

    model: str
    fingerprint: str
    vocabulary: Vocabulary


@dataclass
class CollectedChoice:
    """One choice of a reply that is not streamed."""

    deltas: list[Delta] = field(default_factory=list)
    reason: ShownReason = "stop"
    stop: str | None = None  # the stop string that ended it


async def chunks(form: ReplyFormat, reply: ReplyStream) -> AsyncIterator[bytes]:
    """Yield the events of a streamed reply. Raises as ``ReplyStream.events`` does.

    Before the first token there are only comments: if the engine ends during the prefill, the
    gateway can then send the request once more.
    """
    openings = [sse_event(body) for body in form.openings()]
    async for event in reply.events():
        if openings and not isinstance(event, PrefillProgress):
            yield b"".join(openings)
            openings = []
        match event:
            case ChoiceDelta():
                yield sse_event(form.chunk(event.choice, event.delta))
            case ChoiceEnd():
                yield sse_event(form.last_chunk(event.choice, event.reason, event.stop))
            case PrefillProgress():
                yield sse_comment(f"prefill {event.done}/{event.total}")
    if form.include_usage:
        yield sse_event(form.usage_chunk(reply.usage()))
    yield DONE


async def collected(form: ReplyFormat, reply: ReplyStream) -> JsonObject:
    """Return the complete reply as one object. Raises as ``ReplyStream.events`` does."""
    choices = [CollectedChoice() for _ in range(form.num_choices)]
    async for event in reply.events():
        match event:
            case ChoiceDelta():
                choices[event.choice].deltas.append(event.delta)
            case ChoiceEnd():
                ended = choices[event.choice]
                ended.reason, ended.stop = event.reason, event.stop
    return form.whole(choices, reply.usage())


class _Envelope:
    """The fields that all chunks of one reply share."""

    def __init__(
        self,
        served: AnsweringModel,
        request: ChatRequest | CompletionRequest,
        id_: str,
        kind: str,
        num_choices: int,
    ) -> None:
        self.num_choices = num_choices
        self.include_usage = request.include_usage  # a stream ends with a chunk of token counts
        self._vocabulary = served.vocabulary
        self._fixed: JsonObject = {
            "id": f"{id_}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": served.model,
            "system_fingerprint": served.fingerprint,
        }

    def usage_chunk(self, usage: JsonObject) -> JsonObject:
        """Return the chunk with the token counts."""
        return self._whole([], usage)

    def _chunk(self, choice: JsonObject) -> JsonObject:
        # A client that asks for usage expects the key in every chunk.
        no_usage = {"usage": None} if self.include_usage else {}
        return {**self._fixed, "choices": [choice], **no_usage}

    def _whole(self, choices: Sequence[JsonObject], usage: JsonObject) -> JsonObject:
        return {**self._fixed, "choices": list(choices), "usage": usage}


class ChatFormat(_Envelope):
    """Writes replies of /v1/chat/completions."""

    def __init__(self, served: AnsweringModel, request: ChatRequest) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(served, request, "chatcmpl", kind, request.num_choices)
        self._logprobs = bool(request.logprobs)

    def openings(self) -> list[JsonObject]:
        """The chunks before the first token."""
        first = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(self._delta(i, first)) for i in range(self.num_choices)]

    def chunk(self, choice: int, delta: Delta) -> JsonObject:
        """The chunk that adds ``delta`` to a choice."""
        said: JsonObject = {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.content or not (delta.reasoning or delta.calls):
            said["content"] = delta.content
        if delta.calls:
            calls = sorted(merged_calls(delta.calls).items())
            said["tool_calls"] = [{"index": i, **call} for i, call in calls]
        logprobs = chat_logprobs(delta.scores, self._vocabulary) if delta.scores else None
        return self._chunk(self._delta(choice, said, logprobs))

    def last_chunk(self, choice: int, reason: ShownReason, stop: str | None) -> JsonObject:
        """The chunk that ends a choice; ``stop`` is the stop string that did, as at vLLM."""
        return self._chunk({**self._delta(choice, {}, reason=reason), "stop_reason": stop})

    def whole(self, choices: Sequence[CollectedChoice], usage: JsonObject) -> JsonObject:
        """The reply in one piece."""
        return self._whole([self._message(i, x) for i, x in enumerate(choices)], usage)

    def _delta(
        self,
        choice: int,
        said: JsonObject,
        logprobs: JsonObject | None = None,
        reason: ShownReason | None = None,
    ) -> JsonObject:
        return {"index": choice, "delta": said, "logprobs": logprobs, "finish_reason": reason}

    def _message(self, index: int, whole: CollectedChoice) -> JsonObject:
        said = joined(whole.deltas)
        calls = [call for _, call in sorted(merged_calls(said.calls).items())]
        message: JsonObject = {
            "role": "assistant",
            "content": None if calls and not said.content else said.content,
            "refusal": None,
        }
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(said.scores, self._vocabulary) if self._logprobs else None,
            "finish_reason": whole.reason,
            "stop_reason": whole.stop,
        }


def merged_calls(deltas: Sequence[CallDelta]) -> dict[int, JsonObject]:
    """Return the calls by number, each with the name and arguments of all its deltas joined."""
    calls: dict[int, JsonObject] = defaultdict(lambda: {"function": {"arguments": ""}})
    for delta in deltas:
        call = calls[delta.index]
        if delta.name:
            call["id"], call["type"] = delta.id, "function"
            call["function"]["name"] = delta.name
        call["function"]["arguments"] += delta.arguments
    return calls


class CompletionFormat(_Envelope):
    """Writes replies of /v1/completions; ``prompts`` are the texts to echo, or none."""

    def __init__(
        self, served: AnsweringModel, request: CompletionRequest, prompts: Sequence[str]
    ) -> None:
        num_choices = len(request.prompts) * request.num_choices
        super().__init__(served, request, "cmpl", "text_completion", num_choices)
        self._logprobs = request.logprobs is not None
        self._echoes = [x for x in prompts for _ in range(request.num_choices)]

    def openings(self) -> list[JsonObject]:
        """The chunks before the first token."""
        return [self._chunk(self._choice(i, x)) for i, x in enumerate(self._echoes)]

    def chunk(self, choice: int, delta: Delta) -> JsonObject:
        """The chunk that adds ``delta`` to a choice."""
        scores = delta.scores if self._logprobs and delta.scores else None
        return self._chunk(self._choice(choice, delta.content, scores))

    def last_chunk(self, choice: int, reason: ShownReason, stop: str | None) -> JsonObject:
        """The chunk that ends a choice; ``stop`` is the stop string that did, as at vLLM."""
        return self._chunk({**self._choice(choice, "", reason=reason), "stop_reason": stop})

    def whole(self, choices: Sequence[CollectedChoice], usage: JsonObject) -> JsonObject:
        """The reply in one piece."""
        echoes, shown = self._echoes or [""] * len(choices), []
        for i, (echo, x) in enumerate(zip(echoes, choices, strict=True)):
            said = joined(x.deltas)
            scores = said.scores if self._logprobs else None
            choice = self._choice(i, echo + said.content, scores, x.reason)
            shown.append({**choice, "stop_reason": x.stop})
        return self._whole(shown, usage)

    def _choice(
        self,
        index: int,
        text: str,
        scores: Sequence[ScoredToken] | None = None,
        reason: ShownReason | None = None,
    ) -> JsonObject:
        logprobs = None if scores is None else text_logprobs(scores, self._vocabulary)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


ReplyFormat: TypeAlias = ChatFormat | CompletionFormat
