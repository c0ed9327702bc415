"""Coding agents: the environment variables and files by which each finds a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import tomlkit

from gateway.clients.needs import Connection, FileChange, Server, exports, yaml_line

PROVIDER: Final = "thermocline"


def claude(server: Server, home: Path) -> Connection:
    """Return what Claude Code needs."""
    values = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_MODEL": server.model,
        # Claude Code asks the models of these names for titles and summaries.
        "ANTHROPIC_DEFAULT_OPUS_MODEL": server.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        "API_TIMEOUT_MS": "3000000",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(max(1024, server.max_context // 4)),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Connection(
        exports(values),
        FileChange(home / ".claude" / "settings.json", "json", {"env": values}),
        ["An ANTHROPIC_API_KEY in the environment would be sent as well: unset it."],
    )


def codex(server: Server, home: Path) -> Connection:
    """Return what Codex needs."""
    provider = {
        "name": "Thermocline",
        "base_url": f"{server.url}/v1",
        "wire_api": "responses",
        # Codex exits if this names a variable that is not set.
        "env_key": "THERMOCLINE_API_KEY" if server.needs_key else None,
        "stream_idle_timeout_ms": 3_000_000,
    }
    values = {
        "model": server.model,
        "model_provider": PROVIDER,
        "model_context_window": server.max_context,
        "model_providers": {PROVIDER: provider},
    }
    kept = {key: value for key, value in provider.items() if value is not None}
    written = tomlkit.dumps({**values, "model_providers": {PROVIDER: kept}})
    shown = ["# ~/.codex/config.toml", *written.splitlines()]
    change = FileChange(home / ".codex" / "config.toml", "toml", values)
    if not server.needs_key:
        return Connection(shown, change)
    shown += exports({"THERMOCLINE_API_KEY": server.key})
    note = "Codex reads the key from the environment: export THERMOCLINE_API_KEY in your shell."
    return Connection(shown, change, [note])


def opencode(server: Server, home: Path) -> Connection:
    """Return what OpenCode needs."""
    limit = {"context": server.max_context, "output": max(1024, server.max_context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Thermocline",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key, "timeout": False},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    values = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"{PROVIDER}/{server.model}",
        "provider": {PROVIDER: provider},
    }
    path = home / ".config" / "opencode" / "opencode.json"
    shown = ["// ~/.config/opencode/opencode.json", *json.dumps(values, indent=2).splitlines()]
    return Connection(shown, FileChange(path, "json", values))


def cline(server: Server, home: Path) -> Connection:
    """Return what Cline needs."""
    lines = [
        "API Provider:    OpenAI Compatible",
        f"Base URL:        {server.url}/v1",
        f"API Key:         {server.key}",
        f"Model ID:        {server.model}",
        f"Context Window:  {server.max_context}",
    ]
    return Connection(lines, None, ["Cline keeps this in its editor: enter it in its settings."])


def qwen_code(server: Server, home: Path) -> Connection:
    """Return what Qwen Code needs."""
    values = {
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key,
        "OPENAI_MODEL": server.model,
    }
    return Connection(exports(values), FileChange(home / ".qwen" / ".env", "lines", values))


def aider(server: Server, home: Path) -> Connection:
    """Return what aider needs."""
    values = {
        "openai-api-base": f"{server.url}/v1",
        "openai-api-key": server.key,
        "model": f"openai/{server.model}",
    }
    shown = ["# ~/.aider.conf.yml", *(yaml_line(*x) for x in values.items())]
    return Connection(shown, FileChange(home / ".aider.conf.yml", "yaml", values))
