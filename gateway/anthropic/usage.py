"""Token counts in Anthropic's words: three disjoint parts of the prompt, and the answer."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engines.openai.requests import Json

Ttl: TypeAlias = Literal["5m", "1h"]


class PromptDetails(msgspec.Struct, frozen=True):
    """The parts of a prompt, as far as the engine reports them."""

    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    created_cache_tokens: int | None = None  # vLLM's name for the same


class AnswerDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class EngineUsage(msgspec.Struct, frozen=True):
    """The token counts of an engine's answer."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: AnswerDetails | None = None


def message_usage(usage: EngineUsage, asked_ttl: Ttl | None, num_shown: int | None = None) -> Json:
    """Make the ``usage`` of a message; prompt = ``input`` + ``cache_read`` + ``cache_creation``.

    Every prompt's KV is kept. It counts as created where the request asked for that with a
    ``cache_control``, or where the engine itself says how much it stored.

    Args:
        asked_ttl: of the request's ``cache_control``; None if it has none.
        num_shown: the answer's tokens where the client is shown fewer than the engine made.
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
        "output_tokens": (usage.completion_tokens or 0) if num_shown is None else num_shown,
    }
    thought = usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens
    if thought:
        shown["output_tokens_details"] = {"thinking_tokens": thought}
    return shown
