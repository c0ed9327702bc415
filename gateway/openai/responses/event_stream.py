"""The events of a streamed response, made of the chunks of a streamed chat."""

from __future__ import annotations

from engines.openai.messages import Json
from gateway.errors import Failure
from gateway.metrics import Usage
from gateway.openai.responses.event_writer import EventWriter
from gateway.openai.responses.output import Output
from gateway.openai.responses.response import Draft, cut_short, shown_error
from gateway.relay.chat_chunks import DONE, KEEPALIVE, EventReader, read_chunk


class ResponseEvents:
    """Translates one stream; see ``gateway.relay.answer_format.EventStream``.

    After ``ending`` the whole response is there as ``response``, unless it failed.
    """

    def __init__(self, draft: Draft, output: Output) -> None:
        self._draft = draft
        self._output = output
        self._reader = EventReader()
        self._writer = EventWriter()
        self._usage: Usage | None = None
        self._finish_reason = ""
        self._error: str | None = None  # what the engine reported
        self._ending: list[Json] = []
        self.begun = False
        self.complete = False
        self.response: Json | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def opening(self) -> bytes:
        shown = self._draft.shown("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._writer.write({"type": kind, "response": shown} for kind in kinds)

    def feed(self, chunk: bytes) -> bytes:
        return b"".join(self._translated(data) for data in self._reader.feed(chunk))

    def ending(self, failure: Failure | None) -> bytes:
        if self._error is not None:  # says more than that the stream broke off after it
            failure = Failure(502, self._error, None, "engine")
        if failure is not None:
            failed = self._draft.shown(
                "failed", self._output.items, self._usage, shown_error(failure)
            )
            return self._writer.write([{"type": "response.failed", "response": failed}])
        last = list(self._output.close(whole=not cut_short(self._finish_reason)))
        whole = self._draft.finished(self._output.items, self._usage, self._finish_reason)
        self.response = whole
        self._ending = [*last, {"type": f"response.{whole['status']}", "response": whole}]
        return self._writer.write(self._ending)

    def unstored(self) -> bytes:
        """Return the end anew, of a response that could not be stored."""
        assert self.response is not None
        self.response["store"] = False
        return self._writer.write_again(self._ending)

    def usage(self) -> Usage | None:
        return self._usage

    def _translated(self, data: bytes) -> bytes:
        if data == DONE:
            self.complete = True
            return b""
        if data == KEEPALIVE:
            return data
        chunk = read_chunk(data)
        if chunk.error is not None:
            self._error = _words(chunk.error)
        if chunk.usage is not None:
            self._usage = chunk.usage
        if not chunk.choices:
            return b""
        choice = chunk.choices[0]
        self._finish_reason = choice.finish_reason or self._finish_reason
        written = self._writer.write(self._output.add(choice.part, choice.scores))
        self.begun = self.begun or bool(written)
        return written


def _words(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else "The engine failed; its log says why."
