"""POST /v1/chat/completions and /v1/completions; translates or stores an answer if needed.

Most answers need neither: their bytes are passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines.base import EngineUnavailable, SessionRef
from engines.openai.errors import InvalidRequest
from engines.openai.foreign_request import Dialect
from engines.openai.messages import ImageSupport, Json
from engines.openai.requests import (
    ChatRequest,
    CompletionRequest,
    validate_chat,
    validate_completion,
)
from engines.wire import FillIn
from gateway.errors import Failure
from gateway.gateway import Gateway
from gateway.identity.names import asked_seconds
from gateway.keys import Tenant
from gateway.models import ServedModel
from gateway.openai.chat_fields import ChatCalls, custom_input, for_engine, metadata_of
from gateway.openai.stored_chats import keep_completion, rows_of
from gateway.relay.answer import AnswerFormat, NotStored, TranslatedStream
from gateway.request.body import ParsedBody
from gateway.request.routing import new_router, takes
from gateway.turns import Operation, Translate, Translated, accept, as_it_is
from gateway.watch.requests import Usage

_encode = msgspec.json.Encoder().encode
router = new_router()


class ChatAnswer(AnswerFormat):
    """An answer whose calls are translated into the client's form, or that is to be stored."""

    def __init__(self, calls: ChatCalls) -> None:
        self._calls = calls
        self._events: ChatEvents | None = None
        self._whole: Json | None = None

    @property
    def completion(self) -> Json | None:
        """The whole completion; None until it is complete, and if it failed."""
        if self._events is not None:
            return self._events.completion if self._events.whole else None
        return self._whole

    def events(self, prompt: Usage | None) -> ChatEvents:
        self._events = ChatEvents(self._calls, self.hides_usage)
        return self._events

    def whole(self, body: bytes) -> bytes:
        said = _parsed(body)
        for choice in said.get("choices") or ():
            _show_calls(choice, choice.get("message") or {}, self._calls)
        self._whole = said
        return _encode(said)


class ChatEvents(TranslatedStream):
    """Rewrites the chunks of one stream, and joins them into a completion."""

    def __init__(self, calls: ChatCalls, hides_usage: bool = False) -> None:
        super().__init__(hides_usage)
        self._calls = calls
        self._customs: dict[tuple[int, int], Json] = {}  # calls whose input is not whole yet
        self.completion: Json = {}

    @property
    def whole(self) -> bool:
        """True if the stream ended without an error."""
        return self.complete and not self.failed and bool(self.completion)

    def ending(self, failure: Failure | None) -> bytes:
        # [DONE] is only sent now, after the answer was stored: clients then ask for the object.
        self.failed = self.failed or failure is not None
        return failure.event() if failure else b"data: [DONE]\n\n"

    def translated(self, data: bytes) -> bytes:
        chunk = _parsed(data)
        if "error" in chunk:
            self.failed = True
        if chunk.get("usage"):
            self.usage = msgspec.convert(chunk["usage"], Usage)
        for choice in chunk.get("choices") or ():
            self._show(choice)
        if "error" not in chunk:
            _join(self.completion, chunk)
        if self._hides_usage and chunk.get("choices") == [] and chunk.get("usage"):
            return b""
        return b"data: " + _encode(chunk) + b"\n\n"

    def _show(self, choice: Json) -> None:
        delta = choice.get("delta") or {}
        if self._calls.customs:
            self._hold_customs(choice, delta)
        _show_calls(choice, delta, self._calls)

    def _hold_customs(self, choice: Json, delta: Json) -> None:
        """Hold custom tools' calls back to the end: only whole arguments can become an input."""
        passed = []
        for call in delta.get("tool_calls") or ():
            key = choice["index"], call["index"]
            function = call.get("function") or {}
            if function.get("name") in self._calls.customs:
                self._customs[key] = {**call, "function": {**function, "arguments": ""}}
            if key in self._customs:
                self._customs[key]["function"]["arguments"] += function.get("arguments") or ""
            else:
                passed.append(call)
        if choice.get("finish_reason"):
            passed += [x for (i, _), x in self._customs.items() if i == choice["index"]]
        if "tool_calls" in delta or passed:
            delta["tool_calls"] = passed
            choice["delta"] = delta


def _parsed(data: bytes) -> Json:
    try:
        said = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineUnavailable("its answer cannot be read") from error
    if not isinstance(said, dict):
        raise EngineUnavailable("its answer cannot be read")
    return said


def _show_calls(choice: Json, message: Json, wanted: ChatCalls) -> None:
    """Translate the calls of a message, or of a chunk of one, into the client's form, in place."""
    calls = message.get("tool_calls")
    if wanted.legacy:
        if calls:
            message["function_call"] = calls[0].get("function")
        message.pop("tool_calls", None)
        if choice.get("finish_reason") == "tool_calls":
            choice["finish_reason"] = "function_call"
    elif calls and wanted.customs:
        message["tool_calls"] = [_shown_call(x, wanted) for x in calls]


def _shown_call(call: Json, wanted: ChatCalls) -> Json:
    function = call.get("function") or {}
    if function.get("name") not in wanted.customs:
        return call
    custom = {"name": function["name"], "input": custom_input(function.get("arguments") or "")}
    kept = {k: v for k, v in call.items() if k in ("index", "id")}
    return {**kept, "type": "custom", "custom": custom}


def _join(completion: Json, chunk: Json) -> None:
    """Add a chunk of a stream to the completion that joins all chunks."""
    if not completion:
        completion.update({k: v for k, v in chunk.items() if k not in ("choices", "usage")})
        completion["object"] = "chat.completion"
        completion["choices"] = []
    if chunk.get("usage"):
        completion["usage"] = chunk["usage"]
    for part in chunk.get("choices") or ():
        choice = _choice(completion["choices"], part.get("index", 0))
        _add(choice["message"], part.get("delta") or {})
        choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
        scores = (part.get("logprobs") or {}).get("content")
        if scores:
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"]["content"] += scores


def _choice(choices: list[Json], index: int) -> Json:
    while len(choices) <= index:
        message = {"role": "assistant", "content": None, "refusal": None}
        ends = {"finish_reason": None, "logprobs": None}
        choices.append({"index": len(choices), "message": message, **ends})
    return choices[index]


def _add(message: Json, delta: Json) -> None:
    """Add a chunk's delta to a message: texts are joined, calls by their index."""
    for key, value in delta.items():
        if key == "tool_calls":
            for call in value or ():
                _add_call(message.setdefault(key, []), call)
        elif key == "function_call" and value:
            _add_text(message.setdefault(key, {}), value)
        elif key == "role" or value is None:
            continue
        elif isinstance(value, str):
            message[key] = (message.get(key) or "") + value
        else:
            message[key] = value


def _add_call(calls: list[Json], call: Json) -> None:
    index = call.get("index", len(calls))
    while len(calls) <= index:
        calls.append({})
    own = calls[index]
    for key, value in call.items():
        if isinstance(value, dict):
            _add_text(own.setdefault(key, {}), value)
        elif key != "index":
            own[key] = value


def _add_text(into: Json, more: Any) -> None:
    for key, value in more.items():
        into[key] = (into.get(key) or "") + (value or "")


async def _recall(gateway: Gateway, tenant: Tenant, body: ParsedBody) -> Translate:
    return partial(_translate, gateway, body.model.image_support)


def _translate(gateway: Gateway, image_support: ImageSupport, asked: Json) -> Translated:
    left_out: list[str] = []
    raw, calls = for_engine(asked, left_out, image_support)
    retain_s = asked_seconds(asked)
    if not isinstance(store := asked.get("store"), bool | None):
        raise InvalidRequest("store: use true or false", "store")
    stores = bool(store) and gateway.stored.enabled
    if calls == ChatCalls() and not stores:
        return Translated(raw, AnswerFormat(), None, left_out, retain_s)
    answer = ChatAnswer(calls)
    if not stores:
        return Translated(raw, answer, None, left_out, retain_s)
    messages = rows_of(asked.get("messages") or [])  # checked before they are kept
    keep = partial(_keep, gateway, messages, metadata_of(asked), answer)
    return Translated(raw, answer, keep, left_out, retain_s)


async def _keep(
    gateway: Gateway,
    messages: Sequence[bytes],
    metadata: Json,
    answer: ChatAnswer,
    session: SessionRef,
    is_deleted: Callable[[], bool],
) -> NotStored | None:
    if answer.completion is None:
        return None
    completion = {**answer.completion, "metadata": metadata}
    why = await keep_completion(gateway.stored, messages, completion, session, is_deleted)
    return NotStored(why) if why else None


def _check_early(model: ServedModel, asked: Json) -> None:
    image_support = model.last_image_support
    validate_chat(for_engine(asked, [], image_support)[0], image_support)


CHAT = Operation(
    validate_chat,
    _recall,
    _check_early,
    dialect=Dialect(ChatRequest.__struct_fields__, shows=True),
)


async def _recall_text(gateway: Gateway, tenant: Tenant, body: ParsedBody) -> Translate:
    return partial(_filled_in, body.model.served.fill_in)


def _filled_in(marks: FillIn | None, asked: Json) -> Translated:
    """Write prompt and suffix as one prompt, in the format the model was trained to fill in.

    If ``marks`` is None, the model cannot do that: the suffix stays, and validation refuses it.
    """
    prefix, suffix = asked.get("prompt"), asked.get("suffix")
    if marks is None or not suffix or not isinstance(suffix, str):
        return as_it_is(asked)
    if not isinstance(prefix, str):
        raise InvalidRequest("suffix: it needs one prompt, which is a text", "suffix")
    if asked.get("echo"):
        raise InvalidRequest("suffix: it cannot be combined with echo", "suffix")
    raw = {name: value for name, value in asked.items() if name != "suffix"}
    return as_it_is({**raw, "prompt": marks.prompt(prefix, suffix)})


def _check_text_early(model: ServedModel, asked: Json) -> None:
    asked.pop("suffix", None)  # only the loaded model's engine knows whether it is supported
    validate_completion(asked, model.last_image_support)


TEXT = Operation(
    validate_completion,
    _recall_text,
    _check_text_early,
    dialect=Dialect(CompletionRequest.__struct_fields__, shows=True),
    name="text_completion",
    path="/v1/completions",
)


@router.post(CHAT.path, openapi_extra=takes(ChatRequest))
async def chat_completions(request: Request) -> Response:
    return await accept(request, CHAT)


@router.post(TEXT.path, openapi_extra=takes(CompletionRequest))
async def completions(request: Request) -> Response:
    return await accept(request, TEXT)
