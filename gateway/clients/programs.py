"""Programs of one's own: the lines that ask a server from Python and from a shell."""

from __future__ import annotations

import json
from pathlib import Path

from gateway.clients.needs import Connection, Server, quoted


def openai_sdk(server: Server, home: Path) -> Connection:
    """Say what a program with OpenAI's SDK needs."""
    lines = [
        "from openai import OpenAI",
        "",
        f'client = OpenAI(base_url="{server.url}/v1", api_key={json.dumps(server.key)})',
        "client.chat.completions.create(",
        f"    model={json.dumps(server.model, ensure_ascii=False)},",
        '    messages=[{"role": "user", "content": "Hello"}],',
        '    extra_headers={"X-Session-ID": "me"},  # or none: a chat is known by its messages',
        ")",
    ]
    return Connection(lines)


def curl(server: Server, home: Path) -> Connection:
    """Say what curl needs."""
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hello"}]}
    key = f"-H {quoted(f'authorization: Bearer {server.key}')} " if server.needs_key else ""
    lines = [
        f"curl {server.url}/v1/chat/completions -H 'content-type: application/json' \\",
        f"  {key}-H 'X-Session-ID: me' \\",
        f"  -d {quoted(json.dumps(body, ensure_ascii=False))}",
    ]
    return Connection(lines)
