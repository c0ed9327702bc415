"""Asks the engine questions that are no turns, such as how many tokens a prompt has."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request

from engines.base import EngineUnavailable
from engines.http import TENANT_HEADER, while_client_stays
from engines.openai.errors import InvalidRequest
from engines.openai.requests import PROMPT_FIELDS, TOKENIZE_PATH, Json
from engines.openai.schemas.held import with_well_formed_tools
from engines.wire import TemplateRules
from gateway.keys import Tenant
from gateway.models import ServedModel
from gateway.relay.passthrough import engine_failure
from gateway.request.callers import charged_caller
from gateway.request.fit import fitted, keep_reasoning

QUESTION_S: Final = 60.0


async def answer_to(
    request: Request, model: ServedModel, path: str, question: bytes, limit_s: float = QUESTION_S
) -> bytes:
    """POST ``question``, a body of JSON, to a model's engine; return the body of its answer.

    Tenants' questions take turns, and the engine stops when the client leaves.

    Raises:
        InvalidRequest: the engine refused the question; the message is the engine's.
        EngineUnavailable: the engine is not ready, or has died.
        TimeoutError: there was no answer within ``limit_s``.
        Overloaded: too many questions wait already.
        Draining: the server is shutting down.
        ClientGone: the client left; the engine was stopped.
    """
    ask = partial(_ask, charged_caller(request), model, path, question, limit_s)
    return await while_client_stays(request.receive, ask)


async def _ask(
    caller: Tenant, model: ServedModel, path: str, question: bytes, limit_s: float
) -> bytes:
    headers = {TENANT_HEADER: caller.name, "content-type": "application/json"}
    place = model.sessions.question(caller.name, caller.weight)
    opening = model.engine.open(path, question, headers, wait_s=0.0)
    async with asyncio.timeout(limit_s), place, opening as upstream:
        answer = await upstream.read()
        if upstream.status < 400:
            return answer
        failure = engine_failure(upstream.status, answer)
        if (
            upstream.status in (404, 405) and failure.code == "engine"
        ):  # the engine has no such path
            raise InvalidRequest(f"This engine has no {path}.", code="not_supported", status=404)
        raise InvalidRequest(failure.message, failure.param, failure.code, failure.status)


class _Counted(msgspec.Struct, frozen=True):
    count: int


def count_question(rules: TemplateRules, keeps_reasoning: bool, chat: Json) -> bytes:
    """Return the body of the question how many tokens the chat's prompt has.

    Args:
        rules: the rules of the engine's chat template.
        keeps_reasoning: ``gateway.keep_reasoning``.
        chat: a chat's body, validated, with the served model's name.
    """
    question = {name: chat[name] for name in PROMPT_FIELDS & chat.keys()}
    question["messages"] = fitted(chat["messages"], rules)
    question |= with_well_formed_tools(question)[0]
    if keeps_reasoning:
        keep_reasoning(question, rules)
    effort = question.get("reasoning_effort")
    if effort is not None:  # vLLM's /tokenize only reads it from here
        switches = {"reasoning_effort": effort, **question.get("chat_template_kwargs", {})}
        question["chat_template_kwargs"] = switches
    return msgspec.json.encode(question)


async def prompt_tokens(request: Request, model: ServedModel, question: bytes) -> int:
    """Send a ``count_question`` to a model's engine; return the number of tokens.

    Raises:
        InvalidRequest: the engine refused the question, or cannot count tokens.
        EngineUnavailable: the engine is not ready, or its answer cannot be read.

    See ``answer_to`` for more.
    """
    answer = await answer_to(request, model, TOKENIZE_PATH, question)
    try:
        return msgspec.json.decode(answer, type=_Counted).count
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineUnavailable("its count cannot be read") from error
