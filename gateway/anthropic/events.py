"""Translates the stream of a chat's answer into the events of one of Anthropic's messages.

    message_start, then for each block content_block_start, its deltas, content_block_stop,
    then message_delta (the stop reason, and the counts of all tokens), message_stop

Each delta of the engine becomes an event as soon as its last byte is here. The counts in
``message_start`` are the prompt's, if they are known by then; those in ``message_delta`` are
complete.
"""

from __future__ import annotations

from typing import Final

import msgspec

from engines.base import EngineUnavailable
from engines.openai.requests import Json
from gateway.anthropic.message import (
    Asked,
    empty_message,
    ending,
    message_usage,
    signature,
)
from gateway.errors import Failure
from gateway.relay.answer import AnswerChoice, CallPart, TranslatedStream, read_chunk
from gateway.watch.requests import Usage

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_BROKEN: Final = Failure(502, "The engine's answer cannot be read.", None, "engine")

_encode = msgspec.json.encode


class MessageEvents(TranslatedStream):
    """One streamed message: the engine's bytes in, Anthropic's events out."""

    comment = b""

    def __init__(
        self,
        asked: Asked,
        diagnostics: Json | None = None,
        prompt: Usage | None = None,
    ) -> None:
        """
        Args:
            prompt: the prompt's token counts; None if they are not known at the message's start.
        """
        super().__init__()
        self._asked = asked
        self._prompt = prompt or Usage()
        self._diagnostics = diagnostics
        self._index = -1  # of the newest block
        self._open = ""  # the kind of the block that is open, "" if none is
        self._call = -1  # the engine's number of the newest call
        self._finish: str | None = None
        self._stop: str | int | None = None

    def opening(self) -> bytes:
        """Return ``message_start``."""
        usage = message_usage(self._prompt, self._asked.ttl)
        message = empty_message(self._asked, usage, self._diagnostics)
        return _event("message_start", {"message": message})

    def feed(self, chunk: bytes) -> bytes:
        """Take the engine's next bytes; return the events that are complete with them."""
        if self.failed:
            return b""
        try:
            return super().feed(chunk)
        except EngineUnavailable:
            return self._broken()

    def ending(self, failure: Failure | None) -> bytes:
        """Return the events that end the message, or the one that reports ``failure``."""
        if self.failed:
            return b""
        if failure is not None:
            return failure.anthropic_event()
        usage = self.usage or Usage()
        called = self._call >= 0
        end = ending(self._asked, self._finish, self._stop, called, usage)
        shown = 0 if self._asked.max_tokens == 0 else None
        delta = {"stop_reason": end.reason, "stop_sequence": end.sequence, "stop_details": None}
        counts = message_usage(usage, self._asked.ttl, shown)
        del counts["cache_creation"]  # no field of this event
        last = _event("message_delta", {"delta": {**delta, "container": None}, "usage": counts})
        return self._close() + last + b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    # ---- the engine's events

    def translated(self, data: bytes) -> bytes:
        if self.failed or self.complete:
            return b""
        try:
            chunk = read_chunk(data)
        except EngineUnavailable:  # caught here, so that the events before it are still sent
            return self._broken()
        if chunk.failure is not None:
            self.failed = True
            return Failure(502, chunk.failure, None, "engine").anthropic_event()
        if chunk.usage is not None:
            self.usage = chunk.usage
        return self._choice(chunk.choices[0]) if chunk.choices else b""

    def _choice(self, choice: AnswerChoice) -> bytes:
        if choice.finish_reason is not None:
            self._finish, self._stop = choice.finish_reason, choice.stop_reason
        said = choice.part
        if self._asked.max_tokens == 0:
            return b""
        out = b""
        if said.thought:
            out += self._thought(said.thought)
        if said.content:
            out += self._in_block("text", _TEXT_BLOCK)
            out += _TEXT % (self._index, _encode(said.content))
        for call in said.tool_calls or ():
            out += self._called(call)
        return out

    def _broken(self) -> bytes:
        self.failed = True
        return _BROKEN.anthropic_event()

    def _thought(self, thoughts: str) -> bytes:
        out = self._in_block("thinking", _THINKING_BLOCK)
        if not self._asked.shows_thoughts:
            return out
        return out + _THOUGHT % (self._index, _encode(thoughts))

    def _called(self, call: CallPart) -> bytes:
        out, index = b"", call.index or 0
        if index > self._call:
            self._call = index
            block = {"type": "tool_use", "id": call.id or "", "name": call.function.name or ""}
            out = self._close() + self._begin("tool_use", _encode({**block, "input": {}}))
        if call.function.arguments and index == self._call and self._open == "tool_use":
            out += _ARGUMENTS % (self._index, _encode(call.function.arguments))
        return out

    # ---- blocks

    def _in_block(self, kind: str, block: bytes) -> bytes:
        return b"" if self._open == kind else self._close() + self._begin(kind, block)

    def _begin(self, kind: str, block: bytes) -> bytes:
        self._index += 1
        self._open = kind
        return _START % (self._index, block)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = _SIGNED % (self._index, _encode(signature(self._asked.message_id)))
        self._open = ""
        return signed + _STOP % self._index


def _event(name: str, fields: Json) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encode({"type": name, **fields}))


def _delta(body: bytes) -> bytes:
    head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
    return head + body + b"}\n\n"


_TEXT_BLOCK: Final = b'{"type":"text","text":""}'
_THINKING_BLOCK: Final = b'{"type":"thinking","thinking":"","signature":""}'
_TEXT: Final = _delta(b'{"type":"text_delta","text":%s}')
_THOUGHT: Final = _delta(b'{"type":"thinking_delta","thinking":%s}')
_SIGNED: Final = _delta(b'{"type":"signature_delta","signature":%s}')
_ARGUMENTS: Final = _delta(b'{"type":"input_json_delta","partial_json":%s}')
_START: Final = (
    b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,'
    b'"content_block":%s}\n\n'
)
_STOP: Final = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
