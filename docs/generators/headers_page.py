"""``docs/reference/headers.md``: the headers that are read, and those that answers have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docs.generators.tables import code, page, table

ROOT = Path(__file__).parents[2]
INTRODUCTION = """
Names of headers know no large and small letters. Those that begin with `x-thermocline-` are the
server's own: what a client sends under such a name is dropped.
"""
REQUEST = {
    "Authorization": "`Bearer KEY`",
    "X-API-Key": "the same key, as Anthropic's clients send it",
    "X-Session-ID": "the session that a request belongs to, percent-encoded where it is not ASCII",
    "X-Parent-Session-ID": "the session that started this one, a child, which sleeps first",
    "X-Session-Type": "`child` or `subagent`: a child whose parent is not named",
    "X-Claude-Code-Session-Id": "Claude Code's session",
    "X-Claude-Code-Agent-Id": "a helper within it: a session of its own, and a child",
    "X-Claude-Code-Parent-Agent-Id": "the helper that started the helper",
    "X-Session-Affinity": "OpenCode's session",
    "Session-Id": "Codex' session (older releases: `session_id`)",
    "X-OpenWebUI-Chat-Id": "Open WebUI's chat: the session",
    "X-OpenWebUI-User-Id": "the user within the key, where `gateway.trust_user_header` names it",
    "X-Request-ID": "an id for log lines, taken if it is short and plain; else one is made",
    "Anthropic-Beta": "taken, whatever it says; what is not known is counted",
    "Content-Encoding": "of the body: `gzip`, `deflate`, `zstd` or none",
    "Origin": "of a web page: has to be one of `gateway.allowed_origins`",
    "Host": "has to be one of `gateway.allowed_hosts`",
}
RESPONSE = {
    "x-thermocline-session": "the session's id, percent-encoded where it is not ASCII",
    "x-thermocline-cache": "where the prompt's KV came from: see below",
    "x-thermocline-stored": "`no; reason=WHY`: the answer could not be stored, see below",
    "x-thermocline-replaced": "how many half characters (lone surrogates) of tools became U+FFFD",
    "x-thermocline-left-out": "keywords of JSON schemas that the answer was not held to: see below",
    "x-thermocline-ignored": "fields of the request that this server does not know, 16 at most",
    "x-request-id": "the request's id, also in the log",
    "request-id": "the same, under `/v1/messages`",
    "openai-processing-ms": "milliseconds until the answer's head",
    "retry-after": "seconds after which the request may succeed; with 429 and 503",
    "retry-after-ms": "the same in milliseconds",
    "x-ratelimit-limit-*": "`requests`, `tokens`: what the key may use in a minute",
    "x-ratelimit-remaining-*": "what is left of it",
    "x-ratelimit-reset-*": "seconds until all of it is there again",
    "www-authenticate": "`Bearer`; with 401",
    "accept-encoding": "the encodings of bodies that are taken; with 415",
    "x-accel-buffering": "`no`, of each stream: a proxy is asked to pass events on at once",
    "x-content-type-options": "`nosniff`, on the dashboard's files and `/docs`",
    "x-frame-options": "`DENY`, on the same: no page may frame them",
    "allow": "the methods that the path takes; with 405",
}
CACHE = """
`SOURCE; tokens=N`, and `; reason=WHY` where less was reused than could have been. N tokens of the
prompt were not computed again; `usage` has the same number (`cached_tokens`).

| source | meaning |
|---|---|
| `hot` | it was in the engine's memory, as the session's own or another's that begins the same |
| `cold-ram`, `cold-disk`, `cold-redis` | it slept, and was restored from that tier |
| `miss` | nothing was reused |

The reasons are listed [with the errors](errors.md#reasons-of-a-miss).
"""
STORED = """
The answer is whole, and cannot be asked for again or gone on from. Its body says `"store": false`;
of a stream, whose head has gone out before, its last event does.

| reason | meaning |
|---|---|
| `full` | the disk, or the Redis server, has no room |
| `busy` | too many questions about stored objects wait |
| `unavailable` | the disk or the Redis server cannot be written now |
| `too-large` | it is larger than `gateway.stored_bytes`, or its conversation is full |
| `gone` | its session or conversation was deleted meanwhile |
"""
LEFT_OUT = """
Keywords, with commas between them, that no grammar holds there (`propertyNames`, `uniqueItems`,
patterns that look ahead, unknown formats). They were left out of a schema to which an answer or a
forced call is held; the others hold. A schema that says `strict` is refused instead.
"""
# Names of private headers between gateway and engine, and of words that only look like headers.
PRIVATE = {
    "x-thermocline-tenant",
    "x-thermocline-salt",
    "x-thermocline-patience",
    "x-thermocline-prompt",
}
NO_HEADERS = {"x-anthropic-billing-header"}
_NAME = re.compile(r"x(-[a-z]+)+|retry-after(-ms)?|www-authenticate|request-id|session-id")


def headers_page() -> str:
    rows = [(code(name), meaning) for name, meaning in REQUEST.items()]
    answers = [(code(name), meaning) for name, meaning in RESPONSE.items()]
    return page(
        "Headers",
        INTRODUCTION,
        "## Of a request",
        table(("header", "meaning"), rows),
        "## Of an answer",
        table(("header", "meaning"), answers),
        "## `x-thermocline-cache`",
        CACHE,
        "## `x-thermocline-stored`",
        STORED,
        "## `x-thermocline-left-out`",
        LEFT_OUT,
    )


def headers_in_sources() -> set[str]:
    """List the strings in the gateway and in ``engines/http.py`` that are a header's name."""
    files = [*(ROOT / "gateway").rglob("*.py"), ROOT / "engines" / "http.py"]
    return {name for path in files for name in _names_in(path)} - NO_HEADERS


def described_headers() -> set[str]:
    """List the names that the page has."""
    return {name.lower() for name in (*REQUEST, *RESPONSE)}


def _names_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant):
            text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            if isinstance(text, str) and _NAME.fullmatch(text.lower()):
                yield text.lower()
