"""``docs/reference/errors.md``: statuses, types and codes, and what to do about each code."""

from __future__ import annotations

from collections import defaultdict
from http import HTTPStatus
from typing import get_args

from starlette.exceptions import HTTPException

from docs.generators.error_calls import ErrorCode, error_codes
from docs.generators.tables import code, page, table
from engines.base import KeptReason
from engines.openai.errors import ERROR_TYPES
from gateway.errors import Failure, failure_of
from gateway.openai.conversations import CONVERSATION
from gateway.openai.responses.routes import RESPONSES
from gateway.openai.stored_chats import COMPLETION
from kvstore.session import MissReason
from scheduler.session import SAVING
from scheduler.sessions import SessionKept

INTRODUCTION = """
Every failure has OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`; under
`/v1/messages` it has Anthropic's. The message says what to do; programs go by the status and the
code. With 429 and 503 `retry-after` says when the same request may succeed. What fails in the
middle of a stream is its last event. An error that vLLM found is passed on with vLLM's own code.
"""
TYPES = """
Another status below 500 is an `invalid_request_error`, any other above is a `server_error`. Where
503 is due, `/v1/messages` answers 529.
"""
CODES = """
A request that is wrong in itself (400) has no code unless the table has one; `param` names the
field.
"""
MISSES = """
A miss is no error: the prompt is computed. `x-thermocline-cache` and `/metrics` say why.
"""
# What a code means, and what to do about it. A test finds codes that are missing here, or gone.
MEANINGS = {
    "admin_only": "this needs a key of `gateway.admin_keys`",
    "always_loaded": "this model is not on demand (`load`, in `[[engines]]`): it stays loaded",
    "bad_key": "the line cannot be a key's; nothing was changed",
    "bad_http": "what was sent is no HTTP/1.1 request, or could be read in two ways",
    "bodies_full": "bodies of other requests fill the room that all have; try again",
    "body_timeout": "the body took longer than a minute",
    "body_too_large": "the body is longer than `gateway.max_body_bytes`",
    "cannot_measure": "this engine does not measure on request; use `thermocline calibrate`",
    "completion_not_found": "no stored chat of the caller has this id",
    "context_length_exceeded": "the prompt leaves no room for an answer; shorten it",
    "conversation_not_found": "no conversation of the caller has this id",
    "conversation_too_large": "more than one request may go on from; begin a new conversation",
    "draining": "the server is shutting down; ask another, or try again",
    "engine": "the engine failed in its answer; its log says why; try again",
    "engine_overloaded": "no place in a batch was free within two minutes; try again",
    "engine_refused": "the engine did not do what the gateway asked; the message says why",
    "engine_stalled": "the engine gave no sign of life for two minutes; it restarts",
    "engine_unavailable": "the engine starts, or is started again; try again",
    "framing_too_large": "the chunks of the body have too much around them",
    "generation_failed": "the engine failed while it answered; its log says why",
    "head_timeout": "the head took longer than 20 s",
    "head_too_large": "the head is longer than 32 KiB, or has more than 200 lines",
    "hibernation_disabled": "this engine serves without a cold store",
    "host_missing": "a `Host` header is needed",
    "host_not_allowed": "the name in `Host` is none of `gateway.allowed_hosts`",
    "internal": "a fault of this server; its log has the request's id",
    "invalid_api_key": "no key, or one that opens nothing here",
    "item_not_found": "no stored item of the caller has this id",
    "key_file": "the file of keys cannot be read or written; nothing was changed",
    "key_not_found": "there is no key of this id",
    "keys_fixed": "keys can be changed only where they are in `gateway.api_keys_file`",
    "method_not_allowed": "`allow` lists the methods that the path takes",
    "memory_scarce": "too little memory is left (`scheduler.memory_low_bytes`); try again",
    "model_in_use": "requests use the model, or this server is to serve it; the message says which",
    "model_not_found": "another model is served; `/v1/models`, or set `gateway.model_aliases`",
    "model_not_loaded": "the model is not loaded, or is on its way in or out",
    "no_cold_copy": "the session could not be saved, so that to sleep would lose it",
    "not_cancellable": "there are no background responses to cancel",
    "not_deleted": "the model stays in the hub client's cache; the message says why",
    "not_downloaded": "no download was begun: it is no hub id, or another is on its way",
    "not_found": "there is no such path",
    "not_stored": "nothing is stored here, or it is too large (`gateway.stored_bytes`)",
    "not_supported": "this server, or this engine, does not do that",
    "origin_not_allowed": "the page's origin is none of `gateway.allowed_origins`",
    "previous_response_not_found": "it, or one before it, is not stored (any more)",
    "rate_limit_exceeded": "the waiting line is full, or the key's limits are reached; try again",
    "redis_away": "not known here, and other servers' sessions cannot be seen now; try again",
    "response_not_found": "no stored response of the caller has this id",
    "session_busy": "a turn of the session is being served",
    "session_elsewhere": "another server had it last: only that one can move, pin or wake it",
    "session_limit": "the key has all the sessions it may; delete some",
    "session_not_found": "no session of the caller has this id",
    "session_pinned": "a pinned session is not put to sleep; unpin it first",
    "store_full": "there is no room to store it; delete what is not needed any more",
    "store_unavailable": "what clients stored cannot be reached now; try again",
    "tier_refused": "the tier did not take all of the session; it stays where it was",
    "timeout": "the answer took longer than an hour",
    "too_many_connections": "the client, or all of them, have too many connections open",
    "too_many_values": "the body has too many values, however short it is",
}
MISS_MEANINGS = {
    "never-stored": "nothing of this session was ever saved here",
    "too-short": "the session has fewer tokens than a chunk, and is not stored",
    "diverged": "the new prompt leaves the one that was stored",
    "evicted": "a tier ran out of room",
    "ttl": "not used for `store.ttl_s`",
    "fingerprint": (
        "saved by another model, dtype or layout, in other chunks, or by a codec not known here"
    ),
    "corrupt": "what was stored was damaged, or not sealed by this server's secret",
    "deadline": "the tier was slower than 20 s, or than `store.redis_deadline_s`",
    "computed-sooner": "what it adds to a hot beginning is computed sooner than restored",
    "unavailable": "a tier is down",
    "disabled": "this engine serves without a cold store",
    "foreign-secret": (
        "nothing of it was found, and the data on this Redis was sealed with another secret"
        " (`store.secret_file`) or `store.encrypt`; see `thermocline doctor`"
    ),
    "foreign-seed": (
        "all of it lies under other names: the engine whose data is on this Redis has another"
        " `PYTHONHASHSEED`"
    ),
}


def errors_page() -> str:
    types = [(str(status), code(kind), code(_anthropic(status))) for status, kind in _types()]
    codes = [
        (code(name), ", ".join(statuses), MEANINGS.get(name, "")) for name, statuses in _codes()
    ]
    misses = [(code(reason), MISS_MEANINGS.get(reason, "")) for reason in get_args(MissReason)]
    return page(
        "Errors",
        INTRODUCTION,
        "## Types",
        TYPES,
        table(("status", "`type`", "`type` under `/v1/messages`"), types),
        "## Codes",
        CODES,
        table(("code", "status", "meaning"), codes),
        "## Reasons of a miss",
        MISSES,
        table(("reason", "meaning"), misses),
    )


def all_codes() -> set[ErrorCode]:
    """Add to the codes that are written out those that are computed."""
    computed = [failure_of(HTTPException(status)) for status in (404, 405)]
    computed += [
        failure_of(SessionKept(reason)) for reason in get_args(KeptReason) if reason != SAVING
    ]
    found = error_codes() | {ErrorCode(x.code, x.status) for x in computed if x.code}
    return found | {ErrorCode(x.code, 404) for x in (COMPLETION, CONVERSATION, RESPONSES)}


def _codes() -> list[tuple[str, list[str]]]:
    found: dict[str, set[int]] = defaultdict(set)
    for name, status in all_codes():
        found[name].add(status)
    return [(name, [str(x) for x in sorted(found[name]) if x]) for name in sorted(found)]


def _types() -> list[tuple[int, str]]:
    return sorted(ERROR_TYPES.items())


def _anthropic(status: int) -> str:
    """Read the type off an answer."""
    body = Failure(status, HTTPStatus(status).phrase).anthropic_json()
    return body.decode().partition('"error":{"type":"')[2].partition('"')[0]
