"""Chat pages, editors, automation and programs: the settings by which each finds a server.

For those that keep settings in a database or a dialog, the lines are to be entered by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

from gateway.clients.needs import Connection, FileChange, Server, exports, quoted, yaml_line


def open_webui(server: Server, home: Path) -> Connection:
    """Return what Open WebUI needs: variables of its process."""
    values = {
        "OPENAI_API_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key,
        "DEFAULT_MODELS": server.model,
        # Makes Open WebUI send X-OpenWebUI-Chat-Id, by which this server finds a chat's session,
        # and X-OpenWebUI-User-Id, which gateway.trust_user_header may name.
        "ENABLE_FORWARD_USER_INFO_HEADERS": "true",
    }
    notes = ["Open WebUI reads these at its first start only; change them later as its admin."]
    return Connection(exports(values), None, notes)


def librechat(server: Server, home: Path) -> Connection:
    """Return what LibreChat needs: an endpoint of its librechat.yaml."""
    lines = [
        "# librechat.yaml",
        "endpoints:",
        "  custom:",
        f"    - {yaml_line('name', 'Thermocline')}",
        f"      {yaml_line('baseURL', f'{server.url}/v1')}",
        f"      {yaml_line('apiKey', server.key)}",
        "      models:",
        f"        default: {json.dumps([server.model], ensure_ascii=False)}",
        "      titleConvo: true",
        f"      {yaml_line('titleModel', server.model)}",
        "      headers:",
        f"        {yaml_line('X-Session-ID', '{{LIBRECHAT_BODY_CONVERSATIONID}}')}",
    ]
    return Connection(lines)


def continue_dev(server: Server, home: Path) -> Connection:
    """Return what Continue needs: a model of its config.yaml."""
    lines = [
        "# ~/.continue/config.yaml",
        "name: Thermocline",
        "version: 0.0.1",
        "schema: v1",
        "models:",
        f"  - {yaml_line('name', server.model)}",
        "    provider: openai",
        f"    {yaml_line('model', server.model)}",
        f"    {yaml_line('apiBase', f'{server.url}/v1')}",
        f"    {yaml_line('apiKey', server.key)}",
        "    roles: [chat, edit, apply]",
        "    defaultCompletionOptions:",
        f"      contextLength: {server.max_context}",
    ]
    return Connection(lines)


def zed(server: Server, home: Path) -> Connection:
    """Return what Zed needs: a provider of its settings.json, and the key in the environment."""
    model = {
        "name": server.model,
        "display_name": server.model,
        "max_tokens": server.max_context,
        "max_output_tokens": max(1024, server.max_context // 4),
    }
    provider = {"api_url": f"{server.url}/v1", "available_models": [model]}
    values = {"language_models": {"openai_compatible": {"Thermocline": provider}}}
    path = home / ".config" / "zed" / "settings.json"
    shown = ["// ~/.config/zed/settings.json", *json.dumps(values, indent=2).splitlines()]
    shown += exports({"THERMOCLINE_API_KEY": server.key})
    note = "Zed reads the key from the environment, or from its dialog of providers."
    return Connection(shown, FileChange(path, "json", values), [note])


def vscode(server: Server, home: Path) -> Connection:
    """Return what the chat of VS Code needs: a model with its own API key."""
    lines = [
        "Command:         Chat: Manage Language Models, then Add Models, OpenAI Compatible",
        *_entered(server, "Group Name:      Thermocline", "URL:             "),
    ]
    return Connection(lines, None, ["VS Code keeps this itself: enter it in its dialog."])


def n8n(server: Server, home: Path) -> Connection:
    """Return what n8n needs: a credential, and a model of its OpenAI nodes."""
    lines = _entered(server, "Credential:      OpenAI", "Base URL:        ")
    return Connection(lines, None, ["n8n keeps this in its database: enter it in its editor."])


def home_assistant(server: Server, home: Path) -> Connection:
    """Return what Home Assistant needs: an integration that takes an address."""
    lines = _entered(
        server, "Integration:     Extended OpenAI Conversation (HACS)", "Base URL:        "
    )
    note = "Home Assistant's own OpenAI integration takes no address of another server."
    return Connection(lines, None, [note])


def openai_sdk(server: Server, home: Path) -> Connection:
    """Return what a program with OpenAI's SDK needs."""
    lines = [
        "from openai import OpenAI",
        "",
        f'client = OpenAI(base_url="{server.url}/v1", api_key={json.dumps(server.key)})',
        "client.chat.completions.create(",
        f"    model={json.dumps(server.model, ensure_ascii=False)},",
        '    messages=[{"role": "user", "content": "Hello"}],',
        '    extra_headers={"X-Session-ID": "me"},  # optional: messages identify a chat, too',
        ")",
    ]
    return Connection(lines)


def curl(server: Server, home: Path) -> Connection:
    """Return what curl needs."""
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hello"}]}
    key = f"-H {quoted(f'authorization: Bearer {server.key}')} " if server.needs_key else ""
    lines = [
        f"curl {server.url}/v1/chat/completions -H 'content-type: application/json' \\",
        f"  {key}-H 'X-Session-ID: me' \\",
        f"  -d {quoted(json.dumps(body, ensure_ascii=False))}",
    ]
    return Connection(lines)


def _entered(server: Server, first: str, url: str) -> list[str]:
    return [
        first,
        f"{url}{server.url}/v1",
        f"API Key:         {server.key}",
        f"Model:           {server.model}",
        f"Context:         {server.max_context}",
    ]
