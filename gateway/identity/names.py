"""Ids of sessions: those that a body names, and how an id is written in a header."""

from __future__ import annotations

from collections.abc import Mapping
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
