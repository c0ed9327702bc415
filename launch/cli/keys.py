"""``thermocline keys list`` and ``revoke``: the API keys of a running server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from launch.cli.options import Json
from launch.cli.printing import print_json, print_table
from launch.cli.sessions import DEFAULT_URL, Key, Url


def list_keys(url: Url = DEFAULT_URL, api_key: Key = "", as_json: Json = False) -> None:
    """The keys of a running server, by their ids; needs an admin key."""
    from launch.cli.remote import Remote  # pulls in the HTTP client

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
        right=(),
        empty="no keys",
    )


def revoke_key(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `thermocline keys list` says.")],
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Revoke a key of a running server, for the next request on; needs an admin key."""
    from launch.cli.remote import Remote

    Remote(url, api_key).revoke(key_id)
    print(f"revoked: {key_id}")


def _limits(row: dict[str, Any]) -> str:
    limits: dict[str, int] = row["limits"] or {}
    return " ".join(f"{name}={number}" for name, number in limits.items() if number)
