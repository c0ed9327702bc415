"""Counts the tokens that a chat's prompt would have, by the engine's own tokenizer."""

from __future__ import annotations

import msgspec

from engines.base import EngineUnavailable
from engines.openai.requests import Json
from engines.openai.tokenizing import PROMPT_FIELDS, TOKENIZE_PATH
from gateway.context import Gateway
from gateway.prefixes.inline_system import fitted
from gateway.prefixes.kept_reasoning import keep_reasoning
from gateway.relay.question import answer_to


class _Counted(msgspec.Struct, frozen=True):
    count: int


async def prompt_tokens(gateway: Gateway, chat: Json) -> int:
    """Count the prompt as it would be served: with what the gateway does to messages.

    Args:
        chat: a chat's body, validated, with the served model's name.

    Raises:
        InvalidRequest: the engine refused it, or does not count.
        EngineUnavailable: there is no engine, or its count cannot be read.
    """
    rules = gateway.served.template
    question = {name: chat[name] for name in PROMPT_FIELDS & chat.keys()}
    question["messages"] = fitted(chat["messages"], rules)
    if gateway.config.keep_reasoning:
        keep_reasoning(question, rules)
    effort = question.get("reasoning_effort")
    if effort is not None:  # vLLM looks for it here when it only tokenizes
        switches = {"reasoning_effort": effort, **question.get("chat_template_kwargs", {})}
        question["chat_template_kwargs"] = switches
    answer = await answer_to(gateway.engine, TOKENIZE_PATH, question)
    try:
        return msgspec.json.decode(answer, type=_Counted).count
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineUnavailable("its count cannot be read") from error
