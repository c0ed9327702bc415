"""Names the program that asks by a word of few; what a client chose itself is never shown."""

from __future__ import annotations

from collections.abc import Mapping

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


def client_name(headers: Mapping[str, str]) -> str:
    """Return a word for the client; ``OTHER`` for one that is not known."""
    for header, name in _BY_HEADER.items():
        if header in headers:
            return name
    agent = headers.get("user-agent", "")[:_MOST].lower()
    return next((name for part, name in _BY_AGENT if part in agent), OTHER)
