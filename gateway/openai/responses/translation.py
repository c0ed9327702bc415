"""Makes the body of a chat of a request for a response."""

from __future__ import annotations

from typing import NamedTuple

from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json, Sight
from engines.openai.requests import ChatRequest, validate_chat
from gateway.openai.responses.answer import ResponseAnswer, renamed
from gateway.openai.responses.fields import ResponseFields
from gateway.openai.responses.history import Context
from gateway.openai.responses.items import MessageWriter, check_nesting
from gateway.openai.responses.response import Draft
from gateway.openai.tools import offer
from gateway.stored.seal import Open

# Taken as they are: a chat has them under the same name. Those after the first line are not
# OpenAI's, but engines and their users know them.
_SAME = (
    *("temperature", "top_p", "metadata"),
    *("top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "ignore_eos", "min_tokens", "chat_template_kwargs"),
)


class Known(NamedTuple):
    """Knowledge that items are read with: how sealed ones are opened, which images are taken."""

    open_sealed: Open
    sight: Sight


class Translation(NamedTuple):
    """A request for a response as a chat, and who writes its answer."""

    chat: Json
    answer: ResponseAnswer
    skipped: list[str]  # kinds of tools and items that were left out


def translation(
    fields: ResponseFields, asked: Json, context: Context, known: Known, stores: bool = False
) -> Translation:
    """Translate a request.

    Args:
        asked: the body, for fields that a chat has, too.
        context: the items of the turns before, and the request's own.
        known: what opens the tenant's compactions, and which images are taken.
        stores: the response will be stored.

    Raises:
        InvalidRequest: it cannot be served; names the client's field.
    """
    writer = MessageWriter(known.open_sealed, known.sight)
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


def validate(chat: Json, sight: Sight) -> ChatRequest:
    """Check the chat. Raises ``InvalidRequest``, which names the client's fields."""
    try:
        return validate_chat(chat, sight)
    except InvalidRequest as error:
        param = renamed(error.param)
        message = error.message
        if param and error.param and message.startswith(error.param):
            message = param + message.removeprefix(error.param)
        raise InvalidRequest(message, param, error.code, error.status) from error


def _messages(fields: ResponseFields, writer: MessageWriter) -> list[Json]:
    said = writer.messages()
    if all(x["role"] == "system" for x in said):  # a probe; templates want a message to answer
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
