"""``thermocline keys``: makes API keys, and lists and revokes those of a running server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.keys import BadKeyLine, generate_key
from launch.cli.options import Json
from launch.cli.sessions import Key, Url
from launch.errors import LaunchError, UsageError
from launch.printing import print_json, print_table, say


def made_key(tenant: str) -> tuple[str, str]:
    """A new key, and its line for the key file. Raises ``UsageError`` for an unusable name."""
    try:
        return generate_key(tenant)
    except BadKeyLine:
        raise UsageError(
            f"{tenant!r} cannot be a tenant's name: use up to 64 letters, digits, '.', '_' and '-',"
            " beginning with a letter or digit"
        ) from None


def append_line(file: Path, line: str) -> None:
    """Add ``line``; a new file is readable by its owner only. Raises ``LaunchError``."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b") as stream:
            held = stream.read()
            separator = b"" if not held or held.endswith(b"\n") else b"\n"
            stream.write(separator + line.encode() + b"\n")
    except OSError as error:
        raise LaunchError(f"the key file {file} cannot be written: {error.strerror}") from error


def new_key(
    tenant: Annotated[str, typer.Argument(help="Whose sessions the key opens.")],
    append: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add the line to this file (0600).")
    ] = None,
    url: Annotated[
        str, typer.Option(help="Have this running server make and keep it; needs an admin key.")
    ] = "",
    api_key: Key = "",
) -> None:
    """Make an API key. It is shown once; the server keeps only its hash."""
    if url:
        if append is not None:
            raise UsageError("--append and --url exclude each other: a server keeps its own file")
        from launch.remote.server import Remote

        made = Remote(url, api_key).make_key(tenant)
        say(f"key:  {made['key']}")
        say(f"id:   {made['id']}")
        return
    key, line = made_key(tenant)
    if append is not None:
        append_line(append, line)
    say(f"key:  {key}")
    say(f"line: {line}")
    if append is None:
        say("Put the line into a file and start with: thermocline serve --api-keys FILE")


def list_keys(url: Url = "", api_key: Key = "", as_json: Json = False) -> None:
    """The keys of a running server, by their ids; needs an admin key."""
    from launch.remote.server import Remote  # pulls in the HTTP client

    rows = Remote(url, api_key).keys()
    if as_json:
        print_json(rows)
        return
    print_table(
        ("id", "tenant", "admin", "limits", "kept in"),
        [
            (x["id"], x["tenant"], "yes" if x["admin"] else "", _limits(x), x["kept_in"])
            for x in rows
        ],
        empty="no keys",
    )


def revoke_key(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `thermocline keys list` says.")],
    url: Url = "",
    api_key: Key = "",
) -> None:
    """Revoke a key of a running server, for the next request on; needs an admin key."""
    from launch.remote.server import Remote

    Remote(url, api_key).revoke(key_id)
    say(f"revoked: {key_id}")


def _limits(row: dict[str, Any]) -> str:
    limits: dict[str, int] = row["limits"] or {}
    return " ".join(f"{name}={number}" for name, number in limits.items() if number)
