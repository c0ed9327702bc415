"""``thermocline connect``: what a client needs to use a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.cli.sessions import Key, Url
from launch.printing import say


def connect(
    client: Annotated[
        str,
        typer.Argument(
            help="claude, codex, opencode, cline, qwen-code, aider, open-webui, librechat,"
            " continue, zed, vscode, n8n, home-assistant, openai-sdk or curl."
        ),
    ],
    url: Url = "",
    api_key: Key = "",
    named: Annotated[str, typer.Option("--model", help="Default: the first that is loaded.")] = "",
    write: Annotated[
        bool, typer.Option("--write", help="Merge it into the client's own file of settings.")
    ] = False,
) -> None:
    """Show what an agent, a chat page or an editor needs to use a running server."""
    from gateway.clients.needs import NO_KEY, Server
    from gateway.clients.table import connection
    from launch.cli import client_file
    from launch.errors import LaunchError, UsageError
    from launch.remote.address import server_url
    from launch.remote.gateway import Remote  # pulls in the HTTP client

    base = server_url(url)  # as agents need it, so no unix socket
    models = Remote(base, api_key).models()
    if named:
        there = ", ".join(str(x["id"]) for x in models)
        if not (models := [x for x in models if x["id"] == named]):
            raise UsageError(f"{base} serves no model {named!r}; there are: {there}")
    # One that is loaded, since the context of the others may not be known yet.
    model = next((x for x in models if x["max_model_len"]), None)
    if model is None:
        raise UsageError(
            f"{models[0]['id']} is not loaded, and its context not known: send it a chat first"
        )
    server = Server(base, str(model["id"]), int(model["max_model_len"]), api_key or NO_KEY)
    try:
        needs = connection(client, server, Path.home())
    except LookupError as error:
        raise UsageError(error.args[0]) from error
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if not write:
        say("\n".join(needs.lines))
    elif needs.change is None:
        raise UsageError(f"{client} has no file to write to. {' '.join(needs.notes)}")
    else:
        backup = client_file.write(needs.change)
        kept = f" (as it was: {backup})" if backup else ""
        say(f"wrote {needs.change.path}{kept}", error=True)
    for note in needs.notes:
        say(note, error=True)
