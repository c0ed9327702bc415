"""POST /v1/responses/compact: a conversation made short by a summary of the served model.

What users, system and developer said stays as it is. It is followed by one ``compaction`` item in
place of all else: the summary, sealed for the tenant (``stored.seal``). Sent back as an item of a
later request, it is opened and shown to the model. Nothing is stored here.

The summary is a turn as any other, asked for after the conversation as it stands, tools and all:
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
from gateway.body import ParsedBody
from gateway.context import Gateway
from gateway.errors import Failure
from gateway.identity.names import asked_seconds
from gateway.keys import Tenant
from gateway.models.served_model import ServedModel
from gateway.openai.responses.history import Context, full_items, recalled
from gateway.openai.responses.items import MessageWriter, kind_of
from gateway.openai.responses.output import new_id
from gateway.openai.responses.response import ResponseFields, shown_usage
from gateway.openai.responses.translation import Known, renamed, translation, validate
from gateway.relay.answer_format import AsItIs
from gateway.relay.chat_chunks import Choice, read_chunk
from gateway.stored.seal import SealedText
from gateway.turns import Operation, Translate, Translated, accept

router = APIRouter()
MAX_SUMMARY_TOKENS: Final = 2048
_CONTEXT_SHARE: Final = 16  # clients compact when little room is left
_TOKEN_CHARS: Final = 3  # of an excerpt in place of a summary
_KEPT_ROLES: Final = frozenset({"user", "system", "developer"})
# For models that think before they answer: the tokens are for the summary.
_DEFAULTS: Final[Json] = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
# Where an answer ends: the summary is ours to ask for, and ends when it is complete.
_NOT_TAKEN: Final = frozenset({"stop", "min_tokens", "ignore_eos"})
_CUT: Final = " [...]\n(The summary was cut here: it had reached its limit.)"
_ASKED: Final = (
    "Stop here. Write a summary of this conversation for yourself, since your answers, your tool"
    " calls and their results will not be shown to you any more; messages of the user will. Keep"
    " what is needed to go on: the aim, decisions and their reasons, what was done and found out,"
    " names, paths and values word for word, what failed, and what comes next. Answer with the"
    " summary alone, in plain text."
)


class CompactedAnswer(AsItIs):
    """Makes the compacted window of the engine's summary; it is never streamed."""

    def __init__(self, kept: Sequence[Json], excerpt: str, sealed: SealedText) -> None:
        """``excerpt``: the end of all that is not kept; "" if all is."""
        self._kept = kept
        self._excerpt = excerpt
        self._sealed = sealed

    def whole(self, body: bytes) -> bytes:
        said = read_chunk(body)
        summary = _summary(said.choices[0]) if said.choices else ""
        if not summary or not self._excerpt:  # what was said last is better than nothing
            summary = self._excerpt
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


def _summary(choice: Choice) -> str:
    """Return what the model wrote, with a mark if it was cut; "" if that is no summary."""
    part, is_cut = choice.part, choice.finish_reason == "length"
    summary = (part.content or "").strip()
    if is_cut:
        return summary + _CUT if summary else ""
    # A model that thinks may end before it says anything; what it thought is about the same.
    return summary or part.thought.strip()


async def _recall(gateway: Gateway, tenant: Tenant, body: ParsedBody) -> Translate:
    fields, context = await recalled(gateway, tenant, body)
    return partial(_translate, gateway, body.model, tenant, fields, context)


def _translate(
    gateway: Gateway,
    model: ServedModel,
    tenant: Tenant,
    fields: ResponseFields,
    context: Context,
    asked: Json,
) -> Translated:
    items = [*context.past.items, *context.own]
    kept = [x for x in items if _is_kept(x)]
    rest = [x for x in items if not _is_kept(x)]
    max_tokens = max(1, min(MAX_SUMMARY_TOKENS, model.served.max_context // _CONTEXT_SHARE))
    sealed = gateway.sealed_texts(tenant)
    known = Known(sealed.open, model.sight)
    asking: Json = {"type": "message", "role": "user", "content": _ASKED}
    made = translation(
        _plain(fields, max_tokens if rest else 1),
        {**_DEFAULTS, **{name: x for name, x in asked.items() if name not in _NOT_TAKEN}},
        context._replace(own=[*context.own, asking]),
        known,
    )
    if "tools" in made.chat:
        made.chat["tool_choice"] = "none"  # they stay in the prompt
    answer = CompactedAnswer(kept, _excerpt(rest, known, max_tokens * _TOKEN_CHARS), sealed)
    return Translated(made.chat, answer, None, made.skipped, asked_seconds(asked))


def _plain(fields: ResponseFields, max_tokens: int) -> ResponseFields:
    """Ask for a text of bounded length, whole."""
    limit = min(fields.answer_tokens or max_tokens, max_tokens)
    return msgspec.structs.replace(
        fields, max_output_tokens=limit, stream=None, text=None, top_logprobs=None, include=None
    )


def _is_kept(item: Json) -> bool:
    return kind_of(item) == "message" and item.get("role") in _KEPT_ROLES


def _excerpt(rest: Sequence[Json], known: Known, max_chars: int) -> str:
    """Return the end of the items not kept, word for word, for a model that sums nothing up."""
    writer = MessageWriter(known.open_sealed, known.sight)
    writer.add_all(rest, "input")
    lines = []
    for message in writer.messages():
        said = message["content"]
        calls = [x["function"] for x in message.get("tool_calls", ())]
        lines += [said] if isinstance(said, str) and said else []
        lines += [f"{x['name']}({x['arguments']})" for x in calls]
    return "\n".join(lines)[-max_chars:]


COMPACT = Operation(validate, _recall)


async def compact_conversation(request: Request) -> Response:
    """Make a conversation short: users' messages, and a sealed summary of the rest."""
    return await accept(request, COMPACT)


router.add_route("/v1/responses/compact", compact_conversation, methods=["POST"])
