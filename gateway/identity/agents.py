"""The sessions that coding agents name in their headers, their children, and rows beside them.

An agent's helpers (*subagents*) talk under the session id of their parent; they are distinguished
by an id of their own beside it. A session is the two together, or helper and parent would overwrite
each other's KV at every turn.

Agents ask short things under the id of their conversation: a title, a summary of a page, whether
the server is there. Such a request shares nothing with the conversation, and in its row it would
take the place of all that was computed for it. So an id has two rows, ``ID`` and ``ID/beside``; a
request goes to the one that begins as it does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from engines.openai.requests import Json
from gateway.identity.names import SESSION_ID_HEADER, checked_id, id_from_header
from gateway.identity.outline import DIGEST_BYTES, Outline

PARENT_HEADER = "x-parent-session-id"
TYPE_HEADER = "x-session-type"
_CLAUDE = "x-claude-code-session-id"
_CLAUDE_AGENT = "x-claude-code-agent-id"
_CLAUDE_PARENT = "x-claude-code-parent-agent-id"
# Headers that hold a whole id: OpenCode's, and Codex' in its newer and its older spelling.
_PLAIN = ("x-session-affinity", "session-id", "session_id")
_CHILDREN = ("child", "subagent")
_OLD_CLAUDE = re.compile(r"_session_([A-Za-z0-9][A-Za-z0-9._-]{0,127})$")
SUFFIX: Final = "/beside"
_MUCH_SHORTER: Final = 2  # times


class NamedSession(NamedTuple):
    """The session that a request names, and the session that started it."""

    id: str
    parent: str | None = None
    is_child: bool = False


def by_headers(headers: Mapping[str, str]) -> NamedSession | None:
    """Read the id that a client gave in a header; None if it gave none.

    Raises:
        InvalidRequest: what it gave cannot be an id.
    """
    own = headers.get(SESSION_ID_HEADER)
    if own is not None:
        return _with_parent(checked_id(id_from_header(own), "X-Session-ID"), headers)
    if claude := _id_in(headers, _CLAUDE):
        return _claude(claude, headers)
    for name in _PLAIN:
        if found := _id_in(headers, name):
            return _with_parent(found, headers)
    return None


def named_by_agent(headers: Mapping[str, str]) -> bool:
    """Say whether an agent named the session in its own way, and a user did not choose the id."""
    if SESSION_ID_HEADER in headers:
        return False
    return any(headers.get(name) for name in (_CLAUDE, *_PLAIN))


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
    """Read the session that older Claude Code names in ``metadata.user_id``; None if none.

    It is the same for the helpers of a session, which come without an id of their own. So the
    first thing that was said is a part of the session's id: it differs from helper to helper, and
    stays while a conversation goes on.
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


class Row(NamedTuple):
    """The row of a request."""

    id: str
    is_lesser: bool = False  # the other row holds more


def row_of(
    session_id: str,
    now: Outline,
    latest: Callable[[str], Outline | None],
    is_quiet: Callable[[str], bool],
) -> Row:
    """Choose the row of a request that names ``session_id``.

    Args:
        latest: the latest request of a row; None if none is remembered.
        is_quiet: says whether nothing of a row is being served.
    """
    beside = session_id + SUFFIX
    held = latest(session_id)
    if held is None or begin_alike(held, now):
        return _row(session_id, now, latest(beside))
    other = latest(beside)
    if other is not None and begin_alike(other, now):
        return _row(beside, now, held)
    largest = max(held.size, other.size if other else 0)
    if now.size * _MUCH_SHORTER >= largest and is_quiet(session_id):
        return Row(session_id)  # as a client does that begins anew
    if other is not None and other.size > held.size:
        return _row(session_id, now, other)
    return _row(beside, now, held)


def begin_alike(one: Outline, other: Outline) -> bool:
    """Say whether two requests have a system text or a first message in common."""
    if one.system and one.system == other.system:
        return True
    return one.messages[:DIGEST_BYTES] == other.messages[:DIGEST_BYTES]


def _row(id: str, now: Outline, other: Outline | None) -> Row:
    return Row(id, other is not None and now.size < other.size)
