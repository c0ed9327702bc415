"""The session that a request names: in its headers, as agents do, or in its body.

Subagents send the session id of their parent, and a second id of their own. The id of a subagent's
session joins the two; otherwise subagent and parent would overwrite each other's KV at every turn.

Agents also send short requests under the id of their conversation: for a title, a summary of a
page, or to see whether the server answers. Such a request shares no prefix with the conversation,
and would overwrite its KV. So an id has two sessions, ``ID`` and ``ID/beside``; a request goes to
the one whose prompts begin alike.

Programs ask questions beside a conversation, too (*tasks*): Open WebUI for titles, tags, follow-up
questions and searches, LibreChat for titles, LangChain for summaries. Each is one message whose
first words no person types, and has no later turn, so its KV is evicted first. The tasks of a known
conversation have one session, ``ID/(task)``, which is deleted with it. All others of a tenant share
a few sessions, ``(task-0)`` to ``(task-f)``, chosen by their first words, so that the program's
part of the prompt is reused. After a restart a task is recognised by its session's id alone, so no
client may give a session such an id.

A client may ask for a time to keep its session. That only changes the order in which sessions are
evicted; budgets have precedence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeGuard
from urllib.parse import quote, unquote_to_bytes
from zlib import crc32

import msgspec

from engines.openai.requests import InvalidRequest, Json
from gateway.identity.outline import DIGEST_BYTES, Outline

SESSION_ID_HEADER = "x-session-id"
MAX_ID_BYTES = 256  # of UTF-8
_DOTS = frozenset({".", ".."})
_PLAIN = "!#$&'()*+,-./:;<=>?@[]^_`{|}~ "  # left as they are in headers, as letters and digits are
OTHER = "other"
# Headers that only one program sends.
_BY_HEADER = {
    "x-claude-code-session-id": "claude-code",
    "x-session-affinity": "opencode",
    "x-openwebui-chat-id": "open-webui",
}
# Beginnings or parts of User-Agent, in lower case; the first that is found counts.
_BY_AGENT = (
    ("thermocline", "thermocline"),  # before "cline", with which it ends
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
    ("anthropic", "anthropic-sdk"),
    ("openai", "openai-sdk"),
    ("ai-sdk", "ai-sdk"),
    ("curl/", "curl"),
    ("aiohttp", "python"),
    ("python", "python"),
    ("mozilla/", "browser"),
    ("node", "node"),
)
_MOST = 400  # characters of User-Agent that are read
MAX_RETAIN_S = 24 * 3600.0
# The priority (0 to 100) of a prompt without a directive; a lower one asks for earlier eviction.
_NO_DIRECTIVE = 50
_TTL = re.compile(r"([0-9]{1,6})([smhd]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
PARENT_HEADER = "x-parent-session-id"
TYPE_HEADER = "x-session-type"
_CLAUDE = "x-claude-code-session-id"
_CLAUDE_AGENT = "x-claude-code-agent-id"
_CLAUDE_PARENT = "x-claude-code-parent-agent-id"
# Headers that hold a whole id: OpenCode's, Codex' in both spellings, Open WebUI's.
_WHOLE_IDS = ("x-session-affinity", "session-id", "session_id", "x-openwebui-chat-id")
_CHILDREN = ("child", "subagent")
_OLD_CLAUDE = re.compile(r"_session_([A-Za-z0-9][A-Za-z0-9._-]{0,127})$")
SUFFIX: Final = "/beside"
_MUCH_SHORTER: Final = 2  # times
TASK_SUFFIX: Final = "/(task)"
# The longest answer to a task without a limit: follow-up questions take some 150 tokens, and a
# small model may think before a title.
TASK_TOKENS: Final = 384
_NUM_SHARED_ROWS: Final = 16
_NUM_FIRST_CHARS: Final = 48  # enough to distinguish the tasks of a program
_BEGINNINGS: Final = re.compile(
    r"(?:Provide|Please generate) a concise, 5-word-or-less title for the conversation"
    r"|Analyze this conversation and provide:\n1\. The detected language"  # both LibreChat's
    r"|Progressively summarize the lines of conversation provided"  # LangChain's memory
    r"|Write a concise summary of the following:\n\n\n\""  # and its chains
)
# Open WebUI's tasks. Its questions about documents begin alike, and may quote such a prompt inside.
_OPEN_WEBUI: Final = "### Task:\n", "</chat_history>"
_SHARED_ROW: Final = re.compile(r"\(task-[0-9a-f]\)")


def named_in_body(raw: Json) -> str | None:
    """Return the session id in a body; None if there is none. Raises as ``checked_id`` does."""
    for name in ("session_id", "conversation"):
        value = raw.get(name)
        if name == "conversation" and isinstance(value, dict):
            value = value.get("id")
        if value is not None:
            return checked_id(value, name)
    return None


def group_of(raw: Json) -> str | None:
    """Return ``prompt_cache_key``, which several conversations may share; None if there is none.

    Raises:
        InvalidRequest: the key is not a valid name.
    """
    key = raw.get("prompt_cache_key")
    return None if key is None else checked_name(key, "prompt_cache_key")


def checked_id(value: object, where: str) -> str:
    """Return ``value`` if it can be the id of a new session.

    Clients and proxies resolve "." and ".." in a path, even encoded ones: a session with such an id
    could not be deleted, and the attempt might delete another one.

    Raises:
        InvalidRequest: it is not a valid name, has such a part, or is reserved for tasks; the error
            calls it ``where``.
    """
    name = checked_name(value, where)
    if is_task_session(name):
        refused = f'{where} must not end in "{TASK_SUFFIX}" nor be like "(task-0)"'
        raise InvalidRequest(f"{refused}: such ids are reserved for tasks of programs.", where)
    if _DOTS.isdisjoint(name.split("/")):
        return name
    raise InvalidRequest(
        f'{where} must not be "." or "..", nor have these between slashes; any other printable'
        f" characters will do, 1 to {MAX_ID_BYTES} bytes of UTF-8.",
        where,
    )


def checked_name(value: object, where: str) -> str:
    """Return ``value`` if it is a valid name, which may go into headers, logs and lists.

    Raises:
        InvalidRequest: it is no string, not printable, or too long; the error calls it ``where``.
    """
    # Printable first: a lone surrogate is not, and could not be encoded.
    if isinstance(value, str) and value.isprintable() and 0 < len(value.encode()) <= MAX_ID_BYTES:
        return value
    raise InvalidRequest(
        f"{where} must be a string of printable characters, 1 to {MAX_ID_BYTES} bytes of UTF-8.",
        where,
    )


def id_to_header(session_id: str) -> str:
    """Return an id as percent-encoded UTF-8; printable ASCII other than % is left as it is."""
    return quote(session_id, safe=_PLAIN)


def id_from_header(text: str) -> str:
    """Decode an id that ``id_to_header`` encoded.

    Raises:
        InvalidRequest: ``text`` is not percent-encoded UTF-8.
    """
    try:
        return unquote_to_bytes(text.encode("latin-1")).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("X-Session-ID must be (percent-encoded) UTF-8.") from error


def client_name(headers: Mapping[str, str]) -> str:
    """Return the client's name for metrics; ``OTHER`` for an unknown client."""
    for header, name in _BY_HEADER.items():
        if header in headers:
            return name
    agent = headers.get("user-agent", "")[:_MOST].lower()
    return next((name for part, name in _BY_AGENT if part in agent), OTHER)


def seconds_of(ttl: object) -> float:
    """Return the seconds of a time such as ``"30m"``, at most ``MAX_RETAIN_S``; else 0.0."""
    found = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    if found is None:
        return 0.0
    return min(int(found[1]) * _SECONDS[found[2]], MAX_RETAIN_S)


def asked_seconds(raw: Json) -> float:
    """Return for how many seconds a body asks to keep its session; 0.0 if it does not ask.

    Clients ask by OpenAI's ``prompt_cache_options``, llm-d's router by ``retention_directives``.
    ``prompt_cache_retention`` is an upper limit, so it asks for nothing.
    """
    options, directives = raw.get("prompt_cache_options"), raw.get("retention_directives")
    asked = seconds_of(options.get("ttl")) if isinstance(options, dict) else 0.0
    if not isinstance(directives, list):
        return asked
    return max(asked, *(_directed_seconds(x) for x in directives), 0.0)


def _directed_seconds(directive: object) -> float:
    """Return the seconds of a directive ``{start, end, priority, duration}``; 0.0 if it asks none.

    vLLM's proposal is vllm-project/vllm#38514. A session is kept whole, so the tokens from
    ``start`` to ``end`` do not matter. ``duration`` is in seconds; without it the priority holds
    for ever.
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


class NamedSession(NamedTuple):
    """The session that a request names, and its parent: the session that started it."""

    id: str
    parent: str | None = None
    is_child: bool = False


def by_headers(headers: Mapping[str, str]) -> NamedSession | None:
    """Return the session that the headers name; None if none. Raises as ``checked_id`` does."""
    own = headers.get(SESSION_ID_HEADER)
    if own is not None:
        return _with_parent(checked_id(id_from_header(own), "X-Session-ID"), headers)
    if claude := _id_in(headers, _CLAUDE):
        return _claude(claude, headers)
    for name in _WHOLE_IDS:
        if found := _id_in(headers, name):
            return _with_parent(found, headers)
    return None


def named_session(
    headers: Mapping[str, str], asked: Json, messages: Sequence[object]
) -> NamedSession | None:
    """Return the session that a request's headers or body name; None if they name none."""
    if named := by_headers(headers):
        return named
    session_id = named_in_body(asked) or by_user_id(asked.get("metadata"), messages)
    if session_id is None and "messages" not in asked:
        group = group_of(asked)  # a text completion has no messages by which it could be found
        if group is None:
            return None
        return NamedSession(checked_id(group, "prompt_cache_key"))
    return NamedSession(session_id) if session_id else None


def named_by_agent(headers: Mapping[str, str]) -> bool:
    """Return whether the session's id comes from a field that agents set, not from the user."""
    if SESSION_ID_HEADER in headers:
        return False
    return any(headers.get(name) for name in (_CLAUDE, *_WHOLE_IDS))


def _claude(session: str, headers: Mapping[str, str]) -> NamedSession:
    agent = _id_in(headers, _CLAUDE_AGENT)
    if agent is None:
        return _with_parent(session, headers)
    above = _id_in(headers, _CLAUDE_PARENT)
    parent = session if above is None or above == agent else f"{session}/{above}"
    return NamedSession(checked_id(f"{session}/{agent}", _CLAUDE_AGENT), parent, True)


def _with_parent(session: str, headers: Mapping[str, str]) -> NamedSession:
    parent = _id_in(headers, PARENT_HEADER)
    if parent == session:
        parent = None
    is_child = parent is not None or headers.get(TYPE_HEADER, "").lower() in _CHILDREN
    return NamedSession(session, parent, is_child)


def _id_in(headers: Mapping[str, str], name: str) -> str | None:
    found = headers.get(name)
    return checked_id(id_from_header(found), name) if found else None


def by_user_id(metadata: object, messages: Sequence[object]) -> str | None:
    """Return the session that older Claude Code names in ``metadata.user_id``; None if none.

    Subagents send the same id as their parent, and none of their own. So a hash of the user's first
    message is added: it differs between subagents, and stays the same during a conversation.
    """
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    session = _session_in(user_id) if isinstance(user_id, str) else None
    if session is None:
        return None
    first = next((x for x in messages if isinstance(x, dict) and x.get("role") == "user"), {})
    said = msgspec.json.encode(first.get("content"), order="sorted")
    digest = hashlib.blake2b(said, digest_size=6, person=b"first words").hexdigest()
    return f"{session}/{digest}"


def _session_in(user_id: str) -> str | None:
    if found := _OLD_CLAUDE.search(user_id):
        return found[1]
    if not user_id.startswith("{"):
        return None
    try:
        fields: Json = msgspec.json.decode(user_id, type=dict)
    except (msgspec.DecodeError, RecursionError):
        return None
    named = _OLD_CLAUDE.search(f"_session_{fields.get('session_id')}")
    return named[1] if named and isinstance(fields.get("session_id"), str) else None


class SessionChoice(NamedTuple):
    """The session that a request belongs to, of the two of an id."""

    id: str
    is_lesser: bool = False  # True: the other one's latest prompt is larger


def choose_session(
    session_id: str,
    now: Outline,
    latest: Callable[[str], Outline | None],
    is_quiet: Callable[[str], bool],
) -> SessionChoice:
    """Return the session of a request that names ``session_id``: that one, or the one beside it.

    Args:
        now: the request.
        latest: returns the latest request of a session; None if it is not remembered.
        is_quiet: returns whether a session serves no request now.
    """
    beside = session_id + SUFFIX
    held = latest(session_id)
    if held is None or begin_alike(held, now):
        return _choice(session_id, now, latest(beside))
    other = latest(beside)
    if other is not None and begin_alike(other, now):
        return _choice(beside, now, held)
    largest = max(held.size, other.size if other else 0)
    if now.size * _MUCH_SHORTER >= largest and is_quiet(session_id):
        return SessionChoice(session_id)  # the client has begun a new conversation
    if other is not None and other.size > held.size:
        return _choice(session_id, now, other)
    return _choice(beside, now, held)


def begin_alike(one: Outline, other: Outline) -> bool:
    """Return whether two requests have the same system text or the same first message."""
    if one.system and one.system == other.system:
        return True
    return one.messages[:DIGEST_BYTES] == other.messages[:DIGEST_BYTES]


def _choice(id: str, now: Outline, other: Outline | None) -> SessionChoice:
    return SessionChoice(id, other is not None and now.size < other.size)


def shared_task_session(chat: Json) -> str | None:
    """Return the shared session of a chat that is a task; None if it is no task."""
    messages: Sequence[Json] = chat["messages"]
    if chat.get("stream") or chat.get("tools") or len(messages) > 2:
        return None
    first, last = messages[0], messages[-1]
    if last["role"] != "user" or (first is not last and first["role"] == "user"):
        return None
    text = _first_text(last.get("content")).lstrip()
    if first["role"] in ("assistant", "tool", "function") or not _asks_for_task(text):
        return None
    return f"(task-{crc32(text[:_NUM_FIRST_CHARS].encode()) % _NUM_SHARED_ROWS:x})"


def _asks_for_task(text: str) -> bool:
    begins, ends = _OPEN_WEBUI
    return bool(_BEGINNINGS.match(text)) or (
        text.startswith(begins) and text.rstrip().endswith(ends)
    )


def is_task_session(session_id: str) -> bool:
    """Return whether an id is reserved for tasks."""
    return session_id.endswith(TASK_SUFFIX) or bool(_SHARED_ROW.fullmatch(session_id))


def _first_text(content: object) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    text = parts[0].get("text") if parts and isinstance(parts[0], dict) else None
    return text if isinstance(text, str) else ""
