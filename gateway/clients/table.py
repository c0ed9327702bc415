"""The table of clients, for ``thermocline connect`` and for the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from gateway.clients import agents, apps
from gateway.clients.needs import Connection, Server


class Client(NamedTuple):
    """A client: its name, and the function that returns its settings."""

    name: str
    needs: Callable[[Server, Path], Connection]
    first_prompt: int = 0  # tokens of its first request as measured (docs/clients.md); 0: short


CLIENTS: Final[Mapping[str, Client]] = {
    "claude": Client("Claude Code", agents.claude, 20_000),
    "codex": Client("Codex", agents.codex, 6_400),
    "opencode": Client("OpenCode", agents.opencode, 7_600),
    "cline": Client("Cline", agents.cline),
    "qwen-code": Client("Qwen Code", agents.qwen_code, 18_000),
    "aider": Client("aider", agents.aider),
    "open-webui": Client("Open WebUI", apps.open_webui, 5_400),
    "librechat": Client("LibreChat", apps.librechat),
    "continue": Client("Continue", apps.continue_dev),
    "zed": Client("Zed", apps.zed),
    "vscode": Client("VS Code", apps.vscode),
    "n8n": Client("n8n", apps.n8n),
    "home-assistant": Client("Home Assistant", apps.home_assistant),
    "openai-sdk": Client("OpenAI SDK", apps.openai_sdk),
    "curl": Client("curl", apps.curl),
}


def client_of(name: str) -> Client:
    """Find a client by its name, in any case, with or without hyphens. Raises ``LookupError``."""
    spelt = {known.replace("-", ""): x for known, x in CLIENTS.items()}
    found = spelt.get(name.lower().replace("-", ""))
    if found is None:
        raise LookupError(f"there is no client {name!r}; there are: {', '.join(CLIENTS)}")
    return found


def connection(client: str, server: Server, home: Path) -> Connection:
    """Return the settings that ``client`` needs to use ``server``; ``home``: the user's folder.

    Raises:
        LookupError: the table has no such client.
        ValueError: the server's model or address has control characters.
    """
    found = client_of(client)
    for words, value in (("a model", server.model), ("an address", server.url)):
        if not value or not value.isprintable():  # a line break would begin another setting
            raise ValueError(f"{words} with control characters cannot be used: {value!r}")
    needs = found.needs(server, home)
    return replace(needs, notes=[*needs.notes, *_too_long(found, server.max_context)])


def _too_long(client: Client, max_context: int) -> list[str]:
    if client.first_prompt < max_context:
        return []
    return [
        f"warning: the first prompt of {client.name} has about {client.first_prompt:,} tokens, and"
        f" this server's context is {max_context:,}: it will be refused. Serve a model with a"
        " longer context, or give this one more memory (--hot), if that is what cuts it."
    ]
