"""What an engine is asked: a chat as its template takes it, and questions that are no turn.

A template may refuse system messages in the middle of a chat. Nothing is moved for it. System
messages at the top instead, as some servers write them, would change the prompt from its first
tokens on: all that was computed for the conversation would be lost at every such message.

A question, such as how many tokens a prompt would have, has no session and leaves nothing stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request

from engines.asgi import while_client_stays
from engines.base import Engine, EngineUnavailable
from engines.headers import payer_headers
from engines.openai.errors import InvalidRequest
from engines.openai.requests import PROMPT_FIELDS, TOKENIZE_PATH, Json
from engines.wire import TemplateRules
from gateway.context import caller_of
from gateway.relay.passthrough import engine_failure

QUESTION_S: Final = 60.0
_SYSTEM = ("system", "developer")


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


def fitted(messages: Sequence[Json], rules: TemplateRules) -> list[Json]:
    """Return the messages as the model's template takes them; none is moved.

    A system message after the first becomes a user's, with a mark. Where the template wants user
    and assistant to alternate, it is added to the message before it, and users' messages that
    follow each other are joined.
    """
    made = list(messages)
    if not rules.inline_system and any(_is_inline(messages, i) for i in range(len(messages))):
        made = _with_notes(messages, rules)
    return made if rules.repeated_users else _alternating(made)


def _with_notes(messages: Sequence[Json], rules: TemplateRules) -> list[Json]:
    made: list[Json] = []
    for i, message in enumerate(messages):
        if not _is_inline(messages, i):
            made.append(message)
            continue
        note = f"<system-reminder>\n{_text_of(message)}\n</system-reminder>"
        _add_note(made, note, rules)
    return made


def _is_inline(messages: Sequence[Json], i: int) -> bool:
    return i > 0 and messages[i].get("role") in _SYSTEM


def _text_of(message: Json) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]  # no images, those are refused
        return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in parts)
    return str(content or "")


def _add_note(made: list[Json], note: str, rules: TemplateRules) -> None:
    before = made[-1]
    if not rules.repeated_users and before["role"] in ("user", "tool"):
        made[-1] = _joined(before, {"content": note})
    else:
        made.append({"role": "user", "content": note})


def _alternating(messages: Sequence[Json]) -> list[Json]:
    """Join users' messages that follow each other."""
    made: list[Json] = []
    for message in messages:
        if made and made[-1]["role"] == message["role"] == "user":
            made[-1] = _joined(made[-1], message)
        else:
            made.append(message)
    return made


def _joined(before: Json, after: Json) -> Json:
    """Return ``before`` with the content of both: as text, or as parts if one holds an image."""
    parts = [*_parts(before), *_parts(after)]
    if all(part.get("type") == "text" for part in parts):
        return {**before, "content": f"{_text_of(before)}\n\n{_text_of(after)}"}
    return {**before, "content": parts}


def _parts(message: Json) -> list[Json]:
    content = message.get("content")
    if isinstance(content, list):
        return [part for part in content if isinstance(part, dict)]
    return [{"type": "text", "text": str(content or "")}]


def keep_reasoning(raw: Json, rules: TemplateRules) -> None:
    """Switch this on in a chat's body, unless the client sets the template's switch itself."""
    if rules.reasoning_switch:
        said = raw.get("chat_template_kwargs") or {}
        raw["chat_template_kwargs"] = {**rules.reasoning_switch, **said}
