"""``thermocline connect`` and ``join``: what an agent or a second server needs from a first one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from launch.cli import options
from launch.cli.sessions import DEFAULT_URL, Key, Url
from launch.printing import say
from launch.settings.effective_settings import EffectiveSettings


def connect(
    client: Annotated[
        str, typer.Argument(help="claude, codex, opencode, cline, qwen-code or aider.")
    ],
    url: Url = DEFAULT_URL,
    api_key: Key = "",
    named: Annotated[str, typer.Option("--model", help="Default: the first that is loaded.")] = "",
    write: Annotated[
        bool, typer.Option("--write", help="Merge it into the client's own file of settings.")
    ] = False,
) -> None:
    """Show what a coding agent needs to use a running server."""
    from launch import clients
    from launch.cli.remote import Remote  # pulls in the HTTP client
    from launch.clients import NO_KEY, Server, connection
    from launch.errors import UsageError
    from launch.remote import server_url

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
    needs = connection(client, server, Path.home())
    if not write:
        say("\n".join(needs.lines))
    elif needs.change is None:
        raise UsageError(f"{client} has no file to write to. {' '.join(needs.notes)}")
    else:
        backup = clients.write(needs.change)
        kept = f" (as it was: {backup})" if backup else ""
        say(f"wrote {needs.change.path}{kept}", error=True)
    for note in needs.notes:
        say(note, error=True)


def join(
    context: typer.Context,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="An invitation; - = standard input.")
    ] = None,
    invite: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write an invitation here (0600); - = standard output."),
    ] = None,
    redis_from_there: Annotated[
        str, typer.Option(metavar="URL", help="With --invite: the Redis as others reach it.")
    ] = "",
    redis: Annotated[str | None, typer.Option(metavar="URL", help="As for `serve`.")] = None,
    api_keys: Annotated[str | None, typer.Option(metavar="FILE", help="As for `serve`.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Secret and cold sessions.")] = None,
    profile: options.Profile = None,
    config: options.Config = None,
    assignments: options.Assignments = None,
) -> None:
    """Share sessions with servers on other machines, by one Redis.

    Where a server runs already: `join --invite FILE`. On the other machine: `join FILE`,
    then `serve --config` with the file that it names. Without either, see who is on the
    Redis, and what keeps them apart.
    """
    from launch.errors import UsageError
    from launch.joining import (
        SEED_VARIABLE,
        accept,
        invitation_of,
        is_local,
        read_invitation,
        write_invitation,
    )

    if file is not None and invite is not None:
        raise UsageError("either write an invitation (--invite FILE) or use one (FILE)")
    effective = options.chosen(context, os.environ)
    if invite is not None:
        made = invitation_of(effective, os.environ, redis_from_there)
        write_invitation(made, invite)
        if is_local(made.redis_url):
            say(
                "Redis has an address of this machine alone; others need --redis-from-there URL",
                error=True,
            )
        say(
            "It holds the secret: copy it as you copy keys (scp), and remove it after use.",
            error=True,
        )
    elif file is not None:
        invitation = read_invitation(file)
        settings = accept(invitation, effective.folders.data / "joined")
        say(f"wrote {settings}")
        say(f"start: thermocline serve --config {settings} --model MODEL")
        if (seed := invitation.hash_seed) != os.environ.get(SEED_VARIABLE, ""):
            say(
                "first: " + (f"export {SEED_VARIABLE}={seed}" if seed else f"unset {SEED_VARIABLE}")
            )
        context.params["config"] = settings
        _check(options.chosen(context, os.environ))
    else:
        _check(effective)


def _check(effective: EffectiveSettings) -> None:
    """Print who is on the Redis; exits with 1 if something keeps them apart."""
    from launch.errors import UsageError
    from launch.joining import roll_call

    if not effective.settings.store.redis_url:
        raise UsageError("there is no Redis in these settings (store.redis_url)")
    found = roll_call(effective, os.environ)
    say(f"{found.alike} engines on this Redis have this secret")
    for each in found.differing:
        say(f"differs: {each.text}")
    if found.differing:
        raise typer.Exit(1)
