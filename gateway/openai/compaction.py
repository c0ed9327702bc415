"""POST /v1/responses/compact: a conversation made short by a summary of the served model.

What users, system and developer said stays as it is. Behind it stands one ``compaction`` item in
place of all else: the summary, sealed for the tenant (``sealed_text``). Sent back as an item of a
later request, it is opened and told to the model. Nothing is stored here.

The summary is a turn as any other, asked for behind the conversation as it stands, tools and all:
so its prompt is the one that the conversation's session holds already.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engines.openai.messages import Json
from gateway.context import Gateway
from gateway.errors import Failure, Refused
from gateway.identity.retention import asked_seconds
from gateway.keys import Tenant
from gateway.openai.responses.answer import renamed
from gateway.openai.responses.fields import ResponseFields
from gateway.openai.responses.history import Context, full_items, recalled
from gateway.openai.responses.items import kind_of
from gateway.openai.responses.output import new_id
from gateway.openai.responses.response import shown_usage
from gateway.openai.responses.translation import Known, translation, validate
from gateway.relay.answer_format import AsItIs
from gateway.relay.chat_chunks import read_chunk
from gateway.stored.sealed_text import SealedText
from gateway.turns import Operation, Translate, Translated, accept

router = APIRouter()
MAX_SUMMARY_TOKENS: Final = 2048
_CONTEXT_SHARE: Final = 16  # clients compact when little room is left
_KEPT_ROLES: Final = frozenset({"user", "system", "developer"})
# For models that think before they answer: the tokens are for the summary.
_DEFAULTS: Final[Json] = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
_ASKED: Final = (
    "Stop here. Write a summary of this conversation for yourself, since your answers, your tool"
    " calls and their results will not be shown to you any more; messages of the user will. Keep"
    " what is needed to go on: the aim, decisions and their reasons, what was done and found out,"
    " names, paths and values word for word, what failed, and what comes next. Answer with the"
    " summary alone, in plain text."
)


class CompactedAnswer(AsItIs):
    """Makes the compacted window of the engine's summary; it is never streamed."""

    def __init__(self, kept: Sequence[Json], sealed: SealedText, is_empty: bool) -> None:
        """``is_empty``: there was nothing to sum up."""
        self._kept = kept
        self._sealed = sealed
        self._is_empty = is_empty

    def whole(self, body: bytes) -> bytes:
        said = read_chunk(body)
        part = said.choices[0].part if said.choices else None
        # A model that thinks may end before it says anything; what it thought is about the same.
        summary = ((part.content or part.thought) if part else "").strip()
        if self._is_empty:
            summary = ""
        elif not summary:
            message = "The model wrote no summary: go on with the conversation as it is, or retry."
            raise Refused(Failure(502, message, None, "no_summary"))
        sealed = self._sealed.close(summary)
        item = {"id": new_id("cmp"), "type": "compaction", "encrypted_content": sealed}
        compacted = {
            "id": new_id("resp"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*full_items(self._kept), item],
            "usage": shown_usage(said.usage) if said.usage else None,
        }
        return msgspec.json.encode(compacted)

    def refusal(self, failure: Failure) -> Response:
        return msgspec.structs.replace(failure, param=renamed(failure.param)).response()


async def _recall(gateway: Gateway, tenant: Tenant, asked: Json) -> Translate:
    fields, context = await recalled(gateway, tenant, asked)
    return partial(_translate, gateway, tenant, fields, context)


def _translate(
    gateway: Gateway, tenant: Tenant, fields: ResponseFields, context: Context, asked: Json
) -> Translated:
    items = [*context.past.items, *context.own]
    sealed = gateway.sealed_texts(tenant)
    asking: Json = {"type": "message", "role": "user", "content": _ASKED}
    made = translation(
        _plain(fields, _summary_tokens(gateway.served.max_context, is_empty=not items)),
        {**_DEFAULTS, **asked},
        context._replace(own=[*context.own, asking]),
        Known(sealed.open, gateway.sight),
    )
    if "tools" in made.chat:
        made.chat["tool_choice"] = "none"  # they stay in the prompt
    kept = [x for x in items if kind_of(x) == "message" and x.get("role") in _KEPT_ROLES]
    answer = CompactedAnswer(kept, sealed, not items)
    return Translated(made.chat, answer, None, made.skipped, asked_seconds(asked))


def _plain(fields: ResponseFields, max_tokens: int) -> ResponseFields:
    """Ask for a text of bounded length, whole."""
    limit = min(fields.max_output_tokens or max_tokens, max_tokens)
    return msgspec.structs.replace(
        fields, max_output_tokens=limit, stream=None, text=None, top_logprobs=None, include=None
    )


def _summary_tokens(max_context: int, *, is_empty: bool) -> int:
    return 1 if is_empty else max(1, min(MAX_SUMMARY_TOKENS, max_context // _CONTEXT_SHARE))


COMPACT = Operation(
    "chat", "/v1/chat/completions", validate, lambda raw: raw["messages"], recall=_recall
)


async def compact_conversation(request: Request) -> Response:
    """Make a conversation short: users' messages, and a sealed summary of the rest."""
    return await accept(request, COMPACT)


router.add_route("/v1/responses/compact", compact_conversation, methods=["POST"])
