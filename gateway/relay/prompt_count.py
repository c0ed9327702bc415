"""Counts the tokens that a chat's prompt would have, by the engine's own tokenizer."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from engines.base import Engine, EngineUnavailable
from engines.openai.requests import PROMPT_FIELDS, TOKENIZE_PATH, Json
from engines.wire import TemplateRules
from gateway.prefixes.inline_system import fitted
from gateway.prefixes.kept_reasoning import keep_reasoning
from gateway.relay.question import answer_to


class _Counted(msgspec.Struct, frozen=True):
    count: int


def count_question(rules: TemplateRules, keeps_reasoning: bool, chat: Json) -> bytes:
    """Write what the engine is asked, of the prompt as it would be served.

    Args:
        rules: the engine's, of its template.
        keeps_reasoning: ``gateway.keep_reasoning``.
        chat: a chat's body, validated, with the served model's name.
    """
    question = {name: chat[name] for name in PROMPT_FIELDS & chat.keys()}
    question["messages"] = fitted(chat["messages"], rules)
    if keeps_reasoning:
        keep_reasoning(question, rules)
    effort = question.get("reasoning_effort")
    if effort is not None:  # vLLM looks for it here when it only tokenizes
        switches = {"reasoning_effort": effort, **question.get("chat_template_kwargs", {})}
        question["chat_template_kwargs"] = switches
    return msgspec.json.encode(question)


async def prompt_tokens(request: Request, engine: Engine, question: bytes) -> int:
    """Ask an engine a ``count_question``, for the caller of a request.

    Raises:
        InvalidRequest: the engine refused it, or does not count.
        EngineUnavailable: there is no engine, or its count cannot be read.
    """
    answer = await answer_to(request, engine, TOKENIZE_PATH, question)
    try:
        return msgspec.json.decode(answer, type=_Counted).count
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineUnavailable("its count cannot be read") from error
