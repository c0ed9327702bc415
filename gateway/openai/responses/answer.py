"""The answer to a request for a response: events, a whole object, or a refusal."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from starlette.responses import Response

from engines.openai.messages import Json
from gateway.errors import Failure
from gateway.openai.responses.event_stream import ResponseEvents
from gateway.openai.responses.output import Output
from gateway.openai.responses.response import Draft, cut_short
from gateway.relay.chat_chunks import Choice, read_chunk

# Fields of the chat that a response is made of, and the client's names for them.
_RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}


def renamed(param: str | None) -> str | None:
    """Return the client's name of a chat's field; what it is inside the field is left out."""
    if param is None:
        return None
    field = param.partition("[")[0].partition(".")[0]
    if field == "tools":
        return param.replace(".function.", ".")
    return _RENAMED.get(field, param)


class ResponseAnswer:
    """See ``gateway.relay.answer_format.AnswerFormat``."""

    def __init__(self, draft: Draft, customs: Collection[str]) -> None:
        self._draft = draft
        self._customs = customs
        self._events: ResponseEvents | None = None
        self._whole: Json | None = None

    @property
    def response(self) -> Json | None:
        """The whole response; None as long as it is not, and if it failed."""
        return self._events.response if self._events else self._whole

    def unstored(self) -> bytes:
        """Return the whole answer, or its last events, anew: it could not be stored."""
        if self._events is not None:
            return self._events.unstored()
        assert self._whole is not None
        self._whole["store"] = False
        return msgspec.json.encode(self._whole)

    def events(self) -> ResponseEvents:
        self._events = ResponseEvents(self._draft, Output(self._customs))
        return self._events

    def whole(self, body: bytes) -> bytes:
        said = read_chunk(body)
        choice = said.choices[0] if said.choices else Choice()
        reason = choice.finish_reason or ""
        output = Output(self._customs)
        for _ in output.add(choice.part, choice.scores):
            pass  # the client gets no steps
        for _ in output.close(whole=not cut_short(reason)):
            pass
        self._whole = self._draft.finished(output.items, said.usage, reason)
        return msgspec.json.encode(self._whole)

    def refusal(self, failure: Failure) -> Response:
        return msgspec.structs.replace(failure, param=renamed(failure.param)).response()
