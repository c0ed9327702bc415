"""The table of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from launch.clients import agents, apps
from launch.clients.needs import Connection, Server
from launch.errors import LaunchError, UsageError

# Tokens of a client's first request as it was measured (docs/clients.md): instructions and tools.
FIRST_PROMPT: Final[Mapping[str, int]] = {
    "claude": 20_000,
    "codex": 6_400,
    "open-webui": 5_400,
    "opencode": 7_600,
    "qwen-code": 16_000,
}
CLIENTS: Final[Mapping[str, Callable[[Server, Path], Connection]]] = {
    "aider": agents.aider,
    "claude": agents.claude,
    "cline": agents.cline,
    "codex": agents.codex,
    "continue": apps.continue_dev,
    "home-assistant": apps.home_assistant,
    "librechat": apps.librechat,
    "n8n": apps.n8n,
    "open-webui": apps.open_webui,
    "opencode": agents.opencode,
    "qwen-code": agents.qwen_code,
    "vscode": apps.vscode,
    "zed": apps.zed,
}


def connection(client: str, server: Server, home: Path) -> Connection:
    """Say what a client needs.

    Raises:
        UsageError: that client is unknown.
        LaunchError: the server's model has no name that a file of settings can hold.
    """
    for words, value in (("a model", server.model), ("an address", server.url)):
        if not value or not value.isprintable():  # a line break would begin a setting of its own
            raise LaunchError(f"{words} with control characters cannot be used: {value!r}")
    make = CLIENTS.get(client)
    if make is None:
        raise UsageError(f"there is no client {client!r}; there are: {', '.join(sorted(CLIENTS))}")
    needs = make(server, home)
    notes = [*needs.notes, *_too_long(client, server.max_context)]
    return replace(needs, notes=notes)


def _too_long(client: str, max_context: int) -> list[str]:
    if (tokens := FIRST_PROMPT.get(client, 0)) < max_context:
        return []
    return [
        f"warning: the first prompt of {client} has about {tokens:,} tokens, and this server's"
        f" context is {max_context:,}: it will be refused. Serve a model with a longer context, or"
        " give this one more memory (--hot), if that is what cuts it."
    ]
