"""POST /v1/chat/completions and /v1/completions: what engines speak themselves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.base import SessionRef
from engines.openai.errors import InvalidRequest
from engines.openai.messages import Json
from engines.openai.requests import validate_chat, validate_completion
from engines.wire import FillIn
from gateway.body import ParsedBody
from gateway.context import Gateway
from gateway.identity.retention import asked_seconds
from gateway.keys import Tenant
from gateway.models.served_model import ServedModel
from gateway.openai.chat_answer import ChatAnswer
from gateway.openai.chat_fields import ChatCalls, for_engine, metadata_of
from gateway.openai.stored_chats import keep_completion, rows_of
from gateway.relay.answer_format import AsItIs, NotStored
from gateway.turns import Operation, Translate, Translated, accept, as_it_is

router = APIRouter()


async def _recall(gateway: Gateway, tenant: Tenant, body: ParsedBody) -> Translate:
    return partial(_translate, gateway)


def _translate(gateway: Gateway, asked: Json) -> Translated:
    left_out: list[str] = []
    raw, calls = for_engine(asked, left_out)
    retain_s = asked_seconds(asked)
    stores = asked.get("store") is True and gateway.stored.enabled
    if calls == ChatCalls() and not stores:
        return Translated(raw, AsItIs(), None, left_out, retain_s)
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
) -> NotStored | None:
    if answer.completion is None:
        return None
    completion = {**answer.completion, "metadata": metadata}
    why = await keep_completion(gateway.stored, messages, completion, session)
    return NotStored(why) if why else None


def _check_early(model: ServedModel, asked: Json) -> None:
    validate_chat(for_engine(asked, [])[0], model.last_sight)


CHAT = Operation(
    "chat",
    "/v1/chat/completions",
    validate_chat,
    lambda raw: raw["messages"],
    recall=_recall,
    check_early=_check_early,
)


async def _recall_text(gateway: Gateway, tenant: Tenant, body: ParsedBody) -> Translate:
    return partial(_filled_in, body.model.served.fill_in)


def _filled_in(marks: FillIn | None, asked: Json) -> Translated:
    """Write prompt and suffix as the model learned to fill in the text between them.

    Where it learned no such thing, the suffix stays, and is refused with all else that is wrong.
    """
    prefix, suffix = asked.get("prompt"), asked.get("suffix")
    if marks is None or not suffix or not isinstance(suffix, str):
        return as_it_is(asked)
    if not isinstance(prefix, str):
        raise InvalidRequest("suffix: it needs one prompt, which is a text", "suffix")
    if asked.get("echo"):
        raise InvalidRequest("suffix: leave out echo: the prompt is another one", "suffix")
    raw = {name: value for name, value in asked.items() if name != "suffix"}
    return as_it_is({**raw, "prompt": marks.prompt(prefix, suffix)})


def _check_text_early(model: ServedModel, asked: Json) -> None:
    asked.pop("suffix", None)  # whether the model takes it, its engine says
    validate_completion(asked, model.last_sight)


TEXT = Operation(
    "text_completion",
    "/v1/completions",
    validate_completion,
    lambda raw: [raw["prompt"]],
    recall=_recall_text,
    check_early=_check_text_early,
)


async def chat_completions(request: Request) -> Response:
    return await accept(request, CHAT)


async def completions(request: Request) -> Response:
    return await accept(request, TEXT)


# Plain routes: FastAPI's own resolve dependencies, which are not used here, for every request.
router.add_route(CHAT.path, chat_completions, methods=["POST"])
router.add_route(TEXT.path, completions, methods=["POST"])
