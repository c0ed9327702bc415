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
For those who handle a server's errors: their form, each code with its remedy, and the reasons for
which a prompt's KV was not found.

Every error has OpenAI's form, `{"error": {"message", "type", "param", "code"}}`; under
`/v1/messages` it has Anthropic's. The message says what to do; programs should test the status and
the code. With 429 and 503, `retry-after` says when the same request may succeed. An error in the
middle of a stream is the stream's last event. An error of vLLM is passed on with vLLM's own code.
"""
TYPES = """
Any other status below 500 has the type `invalid_request_error`, any other from 500 on
`server_error`. Instead of 503, `/v1/messages` answers 529.
"""
CODES = """
The error for an invalid request (400) has no code unless the table has one; `param` names the
field.
"""
MISSES = """
A miss is no error: the prompt is computed. `x-thermocline-cache` and `/metrics` give the reason.
"""
# The meaning of each code, and the remedy. A test finds missing and superfluous codes.
MEANINGS = {
    "admin_only": "this needs a key of `gateway.admin_keys`",
    "always_loaded": "this model is not on demand (`load`, in `[[engines]]`): it stays loaded",
    "bad_key": "the line is not a valid key; nothing was changed",
    "bad_http": "the bytes are no HTTP/1.1 request, or an ambiguous one",
    "bodies_full": "bodies of other requests fill the memory for all bodies; try again",
    "body_timeout": "the body took longer than a minute",
    "body_too_large": "the body is longer than `gateway.max_body_bytes`",
    "cannot_measure": "this engine does not measure on request; use `thermocline calibrate`",
    "completion_not_found": "no stored chat of the caller has this id",
    "context_length_exceeded": "the prompt leaves no room for an answer; shorten it",
    "conversation_not_found": "no conversation of the caller has this id",
    "conversation_too_large": "one request cannot continue so much; begin a new conversation",
    "draining": "the server is shutting down; use another one, or try again",
    "engine": "the engine failed in its answer; its log says why; try again",
    "engine_overloaded": "no place in a batch was free within two minutes; try again",
    "engine_refused": "the engine did not do what the gateway asked; the message says why",
    "engine_stalled": "the engine did not respond for two minutes; it is restarted",
    "engine_unavailable": "the engine is starting or restarting; try again",
    "framing_too_large": "the chunked body has too many bytes besides its content",
    "generation_failed": "the engine failed while it answered; its log says why",
    "head_timeout": "the head took longer than 20 s",
    "head_too_large": "the head is longer than 32 KiB, or has more than 200 lines",
    "hibernation_disabled": "this engine serves without a cold store",
    "host_missing": "a `Host` header is needed",
    "host_not_allowed": "the name in `Host` is not in `gateway.allowed_hosts`",
    "internal": "a fault of this server; its log has the request's id",
    "invalid_api_key": "the request has no key, or not a valid one",
    "item_not_found": "no stored item of the caller has this id",
    "key_file": "the file of keys cannot be read or written; nothing was changed",
    "key_not_found": "there is no key with this id",
    "keys_fixed": "keys can be changed only if they are in `gateway.api_keys_file`",
    "method_not_allowed": "`allow` lists the methods that the path takes",
    "memory_scarce": "too little memory is left (`scheduler.memory_low_bytes`); try again",
    "model_in_use": "requests use the model, or this server serves it; the message says which",
    "model_not_found": "`/v1/models` lists the served ones; `gateway.model_aliases` adds names",
    "model_not_loaded": "the model is not loaded, or is being loaded or unloaded",
    "no_cold_copy": "the session could not be saved, so sleeping would lose its KV",
    "not_cancellable": "there are no background responses to cancel",
    "not_deleted": "the model stays in the hub client's cache; the message says why",
    "not_downloaded": "no download was begun: the name is no hub id, or another download runs",
    "not_found": "there is no such path",
    "not_stored": "this server stores nothing, or the object exceeds `gateway.stored_bytes`",
    "not_supported": "this server or engine cannot do that",
    "origin_not_allowed": "the page's origin is not in `gateway.allowed_origins`",
    "previous_response_not_found": "it, or one before it, is not stored (any more)",
    "rate_limit_exceeded": "the waiting line is full, or the key's limits are reached; try again",
    "redis_away": "unknown here; while Redis is away other servers' are not seen; try again",
    "response_not_found": "no stored response of the caller has this id",
    "session_busy": "a turn of the session is being served",
    "session_elsewhere": "another server had it last: only that one can move, pin or wake it",
    "session_limit": "the key has as many sessions as it may have; delete some",
    "session_not_found": "no session of the caller has this id",
    "session_pinned": "a pinned session is not put to sleep; unpin it first",
    "store_full": "there is no room to store it; delete stored objects",
    "store_unavailable": "stored objects cannot be reached now; try again",
    "tier_refused": "the tier did not accept the whole session; it stays where it was",
    "timeout": "the answer took longer than an hour",
    "too_many_connections": "this client, or all clients together, have too many connections",
    "too_many_values": "the body's JSON has too many values",
}
MISS_MEANINGS = {
    "never-stored": "nothing of this session was ever saved here",
    "too-short": "the session has fewer tokens than a chunk, and is not stored",
    "diverged": "the new prompt differs from the stored one",
    "evicted": "a tier had no room for it any more",
    "ttl": "the session was not used for `store.ttl_s`",
    "fingerprint": (
        "it was saved with another model, dtype, layout or chunk size, or an unknown codec"
    ),
    "corrupt": "the stored copy was damaged, or not sealed with this server's secret",
    "deadline": "the tier took longer than 20 s, or than `store.redis_deadline_s`",
    "computed-sooner": "computing the tokens after a hot beginning is faster than restoring them",
    "unavailable": "a tier is down",
    "disabled": "this engine serves without a cold store",
    "foreign-secret": (
        "nothing of it was found, and the data on this Redis was sealed with another secret"
        " (`store.secret_file`) or `store.encrypt`; see `thermocline doctor`"
    ),
    "foreign-seed": (
        "the names of its blobs differ: the engine whose data is on this Redis has another"
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
    """Return the codes that calls write out, and those that are computed."""
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
    """Return the error type of an answer in Anthropic's form."""
    body = Failure(status, HTTPStatus(status).phrase).anthropic_json()
    return body.decode().partition('"error":{"type":"')[2].partition('"')[0]
