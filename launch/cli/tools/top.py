"""``thermocline top``: what a running server does, live."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.cli.sessions import DEFAULT_URL, Key, Url
from launch.errors import UsageError


def top(
    url: Url = DEFAULT_URL,
    api_key: Key = "",
    sort: Annotated[
        str, typer.Option(help="recent, tokens, bytes, saved, turns or id; key s.")
    ] = "recent",
    only: Annotated[str, typer.Option(help="all, awake, asleep or pinned; key f.")] = "all",
    once: Annotated[bool, typer.Option("--once", help="One frame, without keys.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The snapshot as JSON.")] = False,
) -> None:
    """Watch a running server: requests, memory, sessions as they sleep and come back.

    Of several models each has its part. It only looks. Keys: q quits, s sorts
    by something else, f shows other sessions. Without a terminal it prints one
    frame.
    """
    from launch.cli.printing import console, print_json
    from launch.remote.address import Address
    from launch.top.frame import frame
    from launch.top.program import ONCE_ROWS, snapshots, watch
    from launch.top.view import FILTERS, ORDERS

    for option, given, known in (("--sort", sort, ORDERS), ("--only", only, FILTERS)):
        if given not in known:
            raise UsageError(f"{option} {given}: it is one of {', '.join(known)}")
    screen, address = console(), Address(url, api_key)
    if as_json:
        views = [view.as_json() for view in snapshots(address)]
        print_json(views[0] if len(views) == 1 else views)
    elif once or not screen.is_terminal:
        for view in snapshots(address):
            shown = frame(view, order=sort, kept=only, most_rows=ONCE_ROWS, width=screen.width)
            screen.print(shown)
    else:
        try:
            watch(address, screen, sort, only)
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
