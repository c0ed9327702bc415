"""Translates a request for a response into a chat, and the chat's answer into a response."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from engines.openai.errors import InvalidRequest
from engines.openai.messages import ImageSupport, Json
from engines.openai.requests import ChatRequest, validate_chat
from gateway.errors import Failure
from gateway.openai.chat_fields import offer
from gateway.openai.responses.history import Context
from gateway.openai.responses.items import MessageWriter, check_nesting
from gateway.openai.responses.output import Output
from gateway.openai.responses.response import Draft, ResponseFields, cut_short, shown_error
from gateway.relay.answer import AnswerChoice, AnswerFormat, TranslatedStream, read_chunk
from gateway.watch.requests import Usage

_encode = msgspec.json.Encoder().encode
# Fields of the chat, and the client's names for them.
RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
# Fields with the same name and meaning in a chat. Those after the first line are not in OpenAI's
# Responses, but engines and their users know them.
_SAME = (
    *("temperature", "top_p", "metadata"),
    *("top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "ignore_eos", "min_tokens", "chat_template_kwargs"),
)


class EventWriter:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._number = 0

    def write(self, events: Iterable[Json], after: int = -1) -> bytes:
        """Number events and return their bytes, without those whose number is at most ``after``."""
        lines = []
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
            if event["sequence_number"] > after:
                lines.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event)))
        return b"".join(lines)

    def write_again(self, events: Collection[Json]) -> bytes:
        """Return the bytes of the last events again, after a change, with the same numbers."""
        self._number -= len(events)
        return self.write(events)


class ResponseEvents(TranslatedStream):
    """Translates one stream.

    After ``ending``, ``response`` has the whole response, unless that failed.
    """

    def __init__(self, draft: Draft, output: Output) -> None:
        super().__init__()
        self._draft = draft
        self._output = output
        self._writer = EventWriter()
        self._finish_reason = ""
        self._error: str | None = None  # what the engine reported
        self._ending: list[Json] = []
        self.response: Json | None = None

    def opening(self) -> bytes:
        shown = self._draft.shown("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._writer.write({"type": kind, "response": shown} for kind in kinds)

    def ending(self, failure: Failure | None) -> bytes:
        if self._error is not None:  # it says more than the failure that the stream broke off
            failure = Failure(502, self._error, None, "engine")
        if failure is not None:
            failed = self._draft.shown(
                "failed", self._output.items, self.usage, shown_error(failure)
            )
            return self._writer.write([{"type": "response.failed", "response": failed}])
        last = list(self._output.close(whole=not cut_short(self._finish_reason)))
        whole = self._draft.finished(self._output.items, self.usage, self._finish_reason)
        self.response = whole
        self._ending = [*last, {"type": f"response.{whole['status']}", "response": whole}]
        return self._writer.write(self._ending)

    def unstored(self) -> bytes:
        """Return the last events again, with ``store`` false: the response was not stored."""
        assert self.response is not None
        self.response["store"] = False
        return self._writer.write_again(self._ending)

    def translated(self, data: bytes) -> bytes:
        chunk = read_chunk(data)
        self._error = chunk.failure or self._error
        self.failed = self._error is not None
        if chunk.usage is not None:
            self.usage = chunk.usage
        if not chunk.choices:
            return b""
        choice = chunk.choices[0]
        self._finish_reason = choice.finish_reason or self._finish_reason
        return self._writer.write(self._output.add(choice.part, choice.scores))


def renamed(param: str | None) -> str | None:
    """Return the client's name of a chat's field, without a path inside it, except for tools."""
    if param is None:
        return None
    field = param.partition("[")[0].partition(".")[0]
    if field == "tools":
        return param.replace(".function.", ".")
    return RENAMED.get(field, param)


def _in_own_words(message: str, param: str | None) -> tuple[str, str | None]:
    """Return an error's message and field, with the chat's field in the client's words."""
    theirs = renamed(param)
    if theirs and param and message.startswith(param):
        message = theirs + message.removeprefix(param)
    return message, theirs


class ResponseAnswer(AnswerFormat):
    """The answer as a response object, or as its events."""

    def __init__(self, draft: Draft, customs: Collection[str]) -> None:
        self._draft = draft
        self._customs = customs
        self._events: ResponseEvents | None = None
        self._whole: Json | None = None

    @property
    def response(self) -> Json | None:
        """The whole response; None until it is complete, and if it failed."""
        return self._events.response if self._events else self._whole

    def unstored(self) -> bytes:
        """Return the whole answer, or its last events, again, with ``store`` false."""
        if self._events is not None:
            return self._events.unstored()
        assert self._whole is not None
        self._whole["store"] = False
        return msgspec.json.encode(self._whole)

    def events(self, prompt: Usage | None) -> ResponseEvents:
        self._events = ResponseEvents(self._draft, Output(self._customs))
        return self._events

    def whole(self, body: bytes) -> bytes:
        said = read_chunk(body)
        choice = said.choices[0] if said.choices else AnswerChoice()
        reason = choice.finish_reason or ""
        output = Output(self._customs)
        for _ in output.add(choice.part, choice.scores):
            pass  # without streaming the events are not sent
        for _ in output.close(whole=not cut_short(reason)):
            pass
        self._whole = self._draft.finished(output.items, said.usage, reason)
        return msgspec.json.encode(self._whole)

    def refusal(self, failure: Failure) -> Response:
        message, param = _in_own_words(failure.message, failure.param)
        return msgspec.structs.replace(failure, message=message, param=param).response()


class Translation(NamedTuple):
    """A request that was translated into a chat, and the writer of its answer."""

    chat: Json
    answer: ResponseAnswer
    skipped: list[str]  # kinds of tools and items that were left out


def translation(
    fields: ResponseFields,
    asked: Json,
    context: Context,
    image_support: ImageSupport,
    stores: bool = False,
) -> Translation:
    """Translate a request into a chat.

    Args:
        asked: the body, from which fields with the same name in a chat are copied.
        context: the items of earlier turns, and the request's own.
        image_support: the kinds of images that the engine takes.
        stores: whether the response will be stored.

    Raises:
        InvalidRequest: the request cannot be served; the error names the client's field.
    """
    writer = MessageWriter(image_support)
    writer.add_all(context.past.items, "conversation")
    check_nesting(context.own, "input")
    writer.add_all(context.own, "input")
    offered = offer(fields.tools or (), fields.tool_choice, nested=False)
    chat: Json = {
        "model": fields.model,
        "messages": _messages(fields, writer),
        **{name: asked[name] for name in _SAME if asked.get(name) is not None},
        **_options(fields),
    }
    if offered.tools:
        chat["tools"] = offered.tools
        chat["tool_choice"] = offered.choice or "auto"
        if fields.parallel_tool_calls is not None:
            chat["parallel_tool_calls"] = fields.parallel_tool_calls
    answer = ResponseAnswer(Draft(fields, stores), offered.customs)
    return Translation(chat, answer, offered.skipped + writer.skipped)


def validate(chat: Json, image_support: ImageSupport) -> ChatRequest:
    """Validate the chat. Raises ``InvalidRequest`` with the client's name of the field."""
    try:
        return validate_chat(chat, image_support)
    except InvalidRequest as error:
        message, param = _in_own_words(error.message, error.param)
        raise InvalidRequest(message, param, error.code, error.status) from error


def _messages(fields: ResponseFields, writer: MessageWriter) -> list[Json]:
    said = writer.messages()
    if all(x["role"] == "system" for x in said):  # templates require a user's message
        said = [*said, {"role": "user", "content": ""}]
    first = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    return first + said


def _options(fields: ResponseFields) -> Json:
    form = fields.text.format.for_chat() if fields.text and fields.text.format else None
    effort = fields.reasoning.effort if fields.reasoning else None
    chosen = {
        "max_completion_tokens": fields.max_output_tokens,
        "response_format": form,
        "reasoning_effort": effort,
        "logprobs": fields.wants_logprobs or None,
        "top_logprobs": fields.top_logprobs if fields.wants_logprobs else None,
        "stream": fields.stream or None,
        "stream_options": {"include_usage": True} if fields.stream else None,
    }
    return {name: value for name, value in chosen.items() if value is not None}
