"""``thermocline join``: has a second server share the sessions of a first one."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from launch.cli import options
from launch.settings.effective_settings import EffectiveSettings


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
    from launch.joining.acceptance import accept
    from launch.joining.invitation import (
        SEED_VARIABLE,
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
            _say("Redis has an address of this machine alone; others need --redis-from-there URL")
        _say("It holds the secret: copy it as you copy keys (scp), and remove it after use.")
    elif file is not None:
        invitation = read_invitation(file)
        settings = accept(invitation, effective.folders.data / "joined")
        print(f"wrote {settings}")
        print(f"start: thermocline serve --config {settings} --model MODEL")
        if (seed := invitation.hash_seed) != os.environ.get(SEED_VARIABLE, ""):
            print("first:", f"export {SEED_VARIABLE}={seed}" if seed else f"unset {SEED_VARIABLE}")
        context.params["config"] = settings
        _check(options.chosen(context, os.environ))
    else:
        _check(effective)


def _check(effective: EffectiveSettings) -> None:
    """Print who is on the Redis; exits with 1 if something keeps them apart."""
    from launch.errors import UsageError
    from launch.joining.roll_call import roll_call

    if not effective.settings.store.redis_url:
        raise UsageError("there is no Redis in these settings (store.redis_url)")
    found = roll_call(effective, os.environ)
    print(f"{found.alike} engines on this Redis have this secret")
    for each in found.differing:
        print(f"differs: {each.text}")
    if found.differing:
        raise typer.Exit(1)


def _say(words: str) -> None:
    print(words, file=sys.stderr)
