"""``docs/reference/headers.md``: the headers that are read, and those that answers have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docs.generators.tables import code, page, table

ROOT = Path(__file__).parents[2]
INTRODUCTION = """
For those who write a client or a proxy: the headers that the server reads, and those that its
answers have. Upper and lower case make no difference. Headers that begin with `x-thermocline-` are
the server's own: it drops any that a client sends.
"""
REQUEST = {
    "Authorization": "`Bearer KEY`",
    "X-API-Key": "the same key, as Anthropic's clients send it",
    "X-Session-ID": "the session that a request belongs to, percent-encoded if it is not ASCII",
    "X-Parent-Session-ID": "the session that started this one, a child, which sleeps first",
    "X-Session-Type": "`child` or `subagent`: the session is a child, whose parent is not named",
    "X-Claude-Code-Session-Id": "Claude Code's session",
    "X-Claude-Code-Agent-Id": "a subagent of it, which has a session of its own, a child",
    "X-Claude-Code-Parent-Agent-Id": "the subagent that started this one",
    "X-Session-Affinity": "OpenCode's session",
    "Session-Id": "Codex' session (older releases: `session_id`)",
    "X-OpenWebUI-Chat-Id": "Open WebUI's chat: the session",
    "X-OpenWebUI-User-Id": "the user within the key, if `gateway.trust_user_header` names it",
    "X-Request-ID": "an id for log lines, used if it is short and plain; else the server makes one",
    "Anthropic-Beta": "accepted with any value; unknown values are counted",
    "Content-Encoding": "the encoding of the body: `gzip`, `deflate`, `zstd` or none",
    "Origin": "the web page's origin, which must be one of `gateway.allowed_origins`",
    "Host": "must be one of `gateway.allowed_hosts`",
}
RESPONSE = {
    "x-thermocline-session": "the session's id, percent-encoded if it is not ASCII",
    "x-thermocline-cache": "where the prompt's KV came from: see below",
    "x-thermocline-stored": "`no; reason=WHY`: the answer could not be stored, see below",
    "x-thermocline-replaced": "the number of lone surrogates in tools that became U+FFFD",
    "x-thermocline-left-out": "keywords of JSON schemas that were not enforced: see below",
    "x-thermocline-ignored": "fields of the request that this server does not know, 16 at most",
    "x-request-id": "the request's id, also in the log",
    "request-id": "the same, under `/v1/messages`",
    "openai-processing-ms": "milliseconds until the answer's head",
    "retry-after": "seconds after which the request may succeed; with 429 and 503",
    "retry-after-ms": "the same in milliseconds",
    "x-ratelimit-limit-*": "`requests`, `tokens`: the number that the key may use in a minute",
    "x-ratelimit-remaining-*": "the number that is left",
    "x-ratelimit-reset-*": "seconds until the whole number is available again",
    "www-authenticate": "`Bearer`; with 401",
    "accept-encoding": "the encodings of bodies that the server accepts; with 415",
    "x-accel-buffering": "`no`, with each stream: asks proxies to pass events on at once",
    "x-content-type-options": "`nosniff`, on the dashboard's files and `/docs`",
    "x-frame-options": "`DENY`, on the same: no page may frame them",
    "allow": "the methods that the path takes; with 405",
}
CACHE = """
`SOURCE; tokens=N`, and `; reason=WHY` if less was reused than could have been. N tokens of the
prompt were not computed again; `usage` has the same number (`cached_tokens`).

| source | meaning |
|---|---|
| `hot` | KV was in the engine's memory, from this session or from one with the same beginning |
| `cold-ram`, `cold-disk`, `cold-redis` | KV was restored from that tier |
| `miss` | nothing was reused |

The reasons are listed [with the errors](errors.md#reasons-of-a-miss).
"""
STORED = """
The answer is complete, but it cannot be retrieved or continued later. Its body has
`"store": false`; a stream, whose headers are sent before, has that in its last event.

| reason | meaning |
|---|---|
| `full` | the disk, or the Redis server, has no room |
| `busy` | too many requests for stored objects wait |
| `unavailable` | the disk or the Redis server cannot be written now |
| `too-large` | it is larger than `gateway.stored_bytes`, or its conversation is full |
| `gone` | its session or conversation was deleted meanwhile |
"""
LEFT_OUT = """
Keywords, separated by commas, that the engine's grammars cannot enforce (`propertyNames`,
`uniqueItems`, patterns with lookahead, unknown formats). They were left out of the schema of an
answer or of a forced call; its other keywords are enforced. A schema with `strict` is refused
instead.
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
        "## Headers of requests",
        table(("header", "meaning"), rows),
        "## Headers of answers",
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
