"""Writes an engine's whole answer to a chat as one of Anthropic's messages, with token counts."""

from __future__ import annotations

import hashlib
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from engines.base import EngineUnavailable
from engines.openai.messages import without_halves
from engines.openai.requests import Json
from gateway.relay.answer import MessagePart, read_chunk
from gateway.watch.requests import PromptDetails, Usage

Ttl: TypeAlias = Literal["5m", "1h"]
_STOP_REASONS: Final = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def message_usage(usage: Usage, asked_ttl: Ttl | None, num_shown: int | None = None) -> Json:
    """Return the ``usage`` of a message: prompt = ``input`` + ``cache_read`` + ``cache_creation``.

    Every prompt's KV is kept, but only counted as ``cache_creation`` if the engine reports how much
    it stored, or if the request has a ``cache_control``.

    Args:
        asked_ttl: the longest ``ttl`` of the request's ``cache_control``; None if it has none.
        num_shown: the answer's tokens, if the client is shown fewer than the engine made.
    """
    details = usage.prompt_tokens_details or PromptDetails()
    read = min(details.cached_tokens or 0, usage.prompt_tokens)
    rest = usage.prompt_tokens - read
    created = details.cache_write_tokens or details.created_cache_tokens
    if created is None:
        created = rest if asked_ttl else 0
    created = min(created, rest)
    shown: Json = {
        "input_tokens": rest - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": 0 if asked_ttl == "1h" else created,
            "ephemeral_1h_input_tokens": created if asked_ttl == "1h" else 0,
        },
        "output_tokens": usage.completion_tokens if num_shown is None else num_shown,
    }
    if usage.reasoning:
        shown["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    return shown


class Asked(NamedTuple):
    """The fields of a request that shape its answer."""

    message_id: str
    model: str  # as the client named it
    max_tokens: int | None  # 0: the answer is empty; None: as long as the context has room
    shows_thoughts: bool
    ttl: Ttl | None  # of its ``cache_control``, if there is one
    previous_id: str | None = None  # the earlier message that ``diagnostics`` compares with


class Ending(NamedTuple):
    """The reason why an answer ended, in Anthropic's words."""

    reason: str
    sequence: str | None = None


def ending(
    asked: Asked,
    finish_reason: str | None,
    stop: str | int | None,
    called: bool,
    usage: Usage,
) -> Ending:
    """Return the reason why an answer ended.

    Args:
        stop: the stop string that ended it, or the id of a stop token.
        called: True if the answer has a tool call.
    """
    if asked.max_tokens == 0:
        return Ending("max_tokens")
    if finish_reason == "length":
        filled = asked.max_tokens is None or usage.completion_tokens < asked.max_tokens
        return Ending("model_context_window_exceeded" if filled else "max_tokens")
    if called and finish_reason == "tool_calls":
        return Ending("tool_use")
    if isinstance(stop, str):
        return Ending("stop_sequence", stop)
    if called:  # vLLM's reason is "stop" if ``tool_choice`` named one function
        return Ending("tool_use")
    return Ending(_STOP_REASONS.get(finish_reason or "", "end_turn"))


def empty_message(asked: Asked, usage: Json, diagnostics: Json | None) -> Json:
    """Return a message with every field, and without content."""
    return {
        "id": asked.message_id,
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "diagnostics": diagnostics,
        "usage": usage,
    }


def whole_message(asked: Asked, body: bytes, diagnostics: Json | None) -> bytes:
    """Return the body of a message, made from the engine's JSON of a whole answer.

    Raises:
        EngineUnavailable: the engine's answer is not that of a chat.
    """
    answer = read_chunk(body)
    if answer.failure is not None or not answer.choices or answer.choices[0].message is None:
        raise EngineUnavailable("its answer cannot be read")
    counts = answer.usage or Usage()
    if asked.max_tokens == 0:
        usage = message_usage(counts, asked.ttl, 0)
        said = {**empty_message(asked, usage, diagnostics), "stop_reason": "max_tokens"}
        return msgspec.json.encode(said)
    choice = answer.choices[0]
    called = bool(choice.part.tool_calls)
    end = ending(asked, choice.finish_reason, choice.stop_reason, called, counts)
    return msgspec.json.encode(
        {
            **empty_message(asked, message_usage(counts, asked.ttl), diagnostics),
            "content": _blocks(asked, choice.part),
            "stop_reason": end.reason,
            "stop_sequence": end.sequence,
        }
    )


def _blocks(asked: Asked, said: MessagePart) -> list[Json]:
    blocks: list[Json] = []
    if said.thought:
        shown = said.thought if asked.shows_thoughts else ""
        signed = {"thinking": shown, "signature": signature(asked.message_id)}
        blocks.append({"type": "thinking", **signed})
    if said.content:
        blocks.append({"type": "text", "text": said.content})
    for call in said.tool_calls or ():
        name, given = call.function.name or "", tool_input(call.function.arguments or "")
        blocks.append({"type": "tool_use", "id": call.id or "", "name": name, "input": given})
    return blocks


def tool_input(arguments: str) -> Json:
    """Parse a call's arguments; return {} if they are no JSON object, as when a call was cut short.

    Lone surrogates that a model wrote are replaced.
    """
    try:
        given = msgspec.json.decode(without_halves(arguments)[0] or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def signature(message_id: str) -> str:
    """Return the signature of a message's thoughts.

    Clients send it back with the thoughts. It is not checked, since thoughts are only text of the
    prompt here, whoever wrote them.
    """
    return hashlib.blake2b(message_id.encode(), digest_size=24, person=b"thoughts").hexdigest()
