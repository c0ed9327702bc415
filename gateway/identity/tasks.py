"""Tasks: prompts that a program sends beside a conversation, such as one for its title.

Open WebUI asks for titles, tags, follow-up questions and searches, LibreChat for titles, LangChain
for summaries: one message whose first words no person types, answered as a whole, and continued by
nothing. A task is no conversation. It is served after the turns for which a user waits, and its
KV is the first to go.

Tasks of a conversation that is known have one row, ``ID/task``, which is deleted with it. All
others of a tenant share a few rows, by their first words: most of such a prompt is the program's,
and is found there again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from engines.openai.requests import Json

TASK_SUFFIX: Final = "/task"
# The length of an answer whose request names none: follow-up questions take some 150 tokens, and a
# small model may think before a title.
TASK_TOKENS: Final = 384
_NUM_SHARED_ROWS: Final = 16
_NUM_FIRST_CHARS: Final = 48  # these distinguish a program's tasks
_BEGINNINGS: Final = re.compile(
    r"(?:Provide|Please generate) a concise, 5-word-or-less title for the conversation"
    r"|Analyze this conversation and provide:\n1\. The detected language"  # both LibreChat's
    r"|Progressively summarize the lines of conversation provided"  # LangChain's memory
    r"|Write a concise summary of the following:\n\n\n\""  # and its chains
)
# Open WebUI's. A question about documents begins so as well, and may quote such a prompt in them.
_OPEN_WEBUI: Final = "### Task:\n", "</chat_history>"
_SHARED_ROW: Final = re.compile(r"task-[0-9a-f]")


def shared_task_session(chat: Json) -> str | None:
    """Return the row of a chat that is a task of no known conversation; None if it is no task."""
    messages: Sequence[Json] = chat["messages"]
    if chat.get("stream") or chat.get("tools") or len(messages) > 2:
        return None
    first, last = messages[0], messages[-1]
    if last["role"] != "user" or (first is not last and first["role"] == "user"):
        return None
    text = _first_text(last.get("content")).lstrip()
    if first["role"] in ("assistant", "tool", "function") or not _asks_for_task(text):
        return None
    return f"task-{crc32(text[:_NUM_FIRST_CHARS].encode()) % _NUM_SHARED_ROWS:x}"


def _asks_for_task(text: str) -> bool:
    begins, ends = _OPEN_WEBUI
    return bool(_BEGINNINGS.match(text)) or (
        text.startswith(begins) and text.rstrip().endswith(ends)
    )


def is_task_session(session_id: str) -> bool:
    """Say whether tasks were served under an id, as far as it shows."""
    return session_id.endswith(TASK_SUFFIX) or bool(_SHARED_ROW.fullmatch(session_id))


def _first_text(content: object) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    text = parts[0].get("text") if parts and isinstance(parts[0], dict) else None
    return text if isinstance(text, str) else ""
