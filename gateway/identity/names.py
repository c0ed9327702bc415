"""What a body says of its session: its id, and how long it asks to be kept.

A time is the least that its client asks for. It only gives the session a place in the order in
which sessions are given up, and budgets go first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeGuard
from urllib.parse import quote, unquote_to_bytes

from engines.openai.requests import InvalidRequest, Json

SESSION_ID_HEADER = "x-session-id"
MAX_ID_BYTES = 256  # of UTF-8
_DOTS = frozenset({".", ".."})
_PLAIN = "!#$&'()*+,-./:;<=>?@[]^_`{|}~ "  # not encoded in headers, like letters and digits
OTHER = "other"
# Headers that only one program sends.
_BY_HEADER = {
    "x-claude-code-session-id": "claude-code",
    "x-session-affinity": "opencode",
}
# Beginnings or parts of User-Agent, in lower case; the first that is found counts.
_BY_AGENT = (
    ("claude-cli", "claude-code"),
    ("claude-code", "claude-code"),
    ("codex", "codex"),
    ("opencode", "opencode"),
    ("cline", "cline"),
    ("qwen", "qwen-code"),
    ("aider", "aider"),
    ("open-webui", "open-webui"),
    ("openwebui", "open-webui"),
    ("langchain", "langchain"),
    ("litellm", "litellm"),
    ("thermocline", "thermocline"),
    ("anthropic", "anthropic-sdk"),
    ("openai", "openai-sdk"),
    ("ai-sdk", "ai-sdk"),
    ("curl/", "curl"),
    ("aiohttp", "python"),
    ("python", "python"),
    ("mozilla/", "browser"),
    ("node", "node"),
)
_MOST = 400  # characters of a header that are looked at
MAX_RETAIN_S = 24 * 3600.0
# The priority (0 to 100) of a prompt without a directive; what is below may go sooner.
_NO_DIRECTIVE = 50
_TTL = re.compile(r"([0-9]{1,6})([smhd]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def named_in_body(raw: Json) -> str | None:
    """Read the id that a client gave in the body; None if it gave none.

    Raises:
        InvalidRequest: what it gave cannot be an id.
    """
    for name in ("session_id", "conversation"):
        value = raw.get(name)
        if name == "conversation" and isinstance(value, dict):
            value = value.get("id")
        if value is not None:
            return checked_id(value, name)
    return None


def group_of(raw: Json) -> str | None:
    """Read ``prompt_cache_key``, which several conversations may share; None if there is none.

    Raises:
        InvalidRequest: it is no string that could be a name.
    """
    key = raw.get("prompt_cache_key")
    return None if key is None else checked_name(key, "prompt_cache_key")


def checked_id(value: object, where: str) -> str:
    """Return ``value`` if it can be the id of a new session.

    Clients and proxies resolve "." and ".." in a path, encoded or not, so under such an id a
    session could not be deleted, and an attempt might delete another one.

    Raises:
        InvalidRequest: it is no name, or has such a part; ``where`` names it.
    """
    name = checked_name(value, where)
    if _DOTS.isdisjoint(name.split("/")):
        return name
    raise InvalidRequest(
        f'{where} must not be "." or "..", nor have these between slashes; any other printable'
        f" characters will do, 1 to {MAX_ID_BYTES} bytes of UTF-8.",
        where,
    )


def checked_name(value: object, where: str) -> str:
    """Return ``value`` if it is a name: these end up in headers, logs and lists.

    Raises:
        InvalidRequest: it is no string, not printable, or too long; ``where`` names it.
    """
    # Printable first: a lone surrogate is not, and could not be encoded.
    if isinstance(value, str) and value.isprintable() and 0 < len(value.encode()) <= MAX_ID_BYTES:
        return value
    raise InvalidRequest(
        f"{where} must be a string of printable characters, 1 to {MAX_ID_BYTES} bytes of UTF-8.",
        where,
    )


def id_to_header(session_id: str) -> str:
    """Encode an id as percent-encoded UTF-8; plain ASCII (without %) stays as it is."""
    return quote(session_id, safe=_PLAIN)


def id_from_header(text: str) -> str:
    """Read what ``id_to_header`` wrote.

    Raises:
        InvalidRequest: it is not percent-encoded UTF-8.
    """
    try:
        return unquote_to_bytes(text.encode("latin-1")).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("X-Session-ID must be (percent-encoded) UTF-8.") from error


def client_name(headers: Mapping[str, str]) -> str:
    """Return a word for the client; ``OTHER`` for one that is not known."""
    for header, name in _BY_HEADER.items():
        if header in headers:
            return name
    agent = headers.get("user-agent", "")[:_MOST].lower()
    return next((name for part, name in _BY_AGENT if part in agent), OTHER)


def seconds_of(ttl: object) -> float:
    """Read a time like ``"30m"``, in seconds; 0.0 for anything else. At most ``MAX_RETAIN_S``."""
    found = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if found is None:
        return 0.0
    return min(int(found[1]) * _SECONDS[found[2]], MAX_RETAIN_S)


def asked_seconds(raw: Json) -> float:
    """Read how long a chat's body asks to keep it, in seconds.

    Clients say so in OpenAI's ``prompt_cache_options``, llm-d's router in ``retention_directives``.
    ``prompt_cache_retention`` names a time that must not be exceeded, so it asks for nothing here.
    """
    options, directives = raw.get("prompt_cache_options"), raw.get("retention_directives")
    asked = seconds_of(options.get("ttl")) if isinstance(options, dict) else 0.0
    if not isinstance(directives, list):
        return asked
    return max(asked, *(_directed_seconds(x) for x in directives), 0.0)


def _directed_seconds(directive: object) -> float:
    """Read one of vLLM's proposed ``{start, end, priority, duration}`` (vllm-project/vllm#38514).

    A session is kept whole, so the tokens from ``start`` to ``end`` do not matter. Without a
    ``duration``, in seconds, the priority has no end.
    """
    if not isinstance(directive, dict):
        return 0.0
    priority, seconds = directive.get("priority"), directive.get("duration")
    seconds = MAX_RETAIN_S if seconds is None else seconds
    if not _is_number(priority) or not _is_number(seconds) or priority < _NO_DIRECTIVE:
        return 0.0
    return float(min(max(seconds, 0), MAX_RETAIN_S))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
