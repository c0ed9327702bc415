"""Asks the engine something that is no turn, such as how many tokens a prompt would have."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request

from engines.base import Engine, EngineUnavailable
from engines.http import payer_headers, while_client_stays
from engines.openai.errors import InvalidRequest
from engines.openai.requests import PROMPT_FIELDS, TOKENIZE_PATH, Json
from engines.wire import TemplateRules
from gateway.body import fitted, keep_reasoning
from gateway.context import caller_of
from gateway.relay.passthrough import engine_failure

QUESTION_S: Final = 60.0


async def answer_to(
    request: Request, engine: Engine, path: str, question: bytes, limit_s: float = QUESTION_S
) -> bytes:
    """POST ``question``, a body of JSON, to an engine; returns the body of its answer.

    The engine hears who asks, since its tenants take turns, and of a client that leaves.

    Raises:
        InvalidRequest: the engine refused it, with the engine's words.
        EngineUnavailable: there is no engine, or it went away.
        TimeoutError: no answer within ``limit_s``.
        ClientGone: the client left; the engine has stopped.
    """
    caller = caller_of(request)
    headers = {**payer_headers(caller.name, caller.weight), "content-type": "application/json"}
    ask = partial(_ask, engine, path, question, limit_s, headers)
    return await while_client_stays(request.receive, ask)


async def _ask(
    engine: Engine, path: str, question: bytes, limit_s: float, headers: dict[str, str]
) -> bytes:
    opening = engine.open(path, question, headers)
    async with asyncio.timeout(limit_s), opening as upstream:
        answer = await upstream.read()
        if upstream.status < 400:
            return answer
        failure = engine_failure(upstream.status, answer)
        if upstream.status in (404, 405) and failure.code == "engine":  # not in our shape: no path
            raise InvalidRequest(f"This engine has no {path}.", code="not_supported", status=404)
        raise InvalidRequest(failure.message, failure.param, failure.code, failure.status)


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
