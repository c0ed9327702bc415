"""``thermocline chat`` and ``thermocline top``: a running server in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.cli.sessions import DEFAULT_URL, Key, Url
from launch.errors import UsageError


def chat(
    url: Url = DEFAULT_URL,
    api_key: Key = "",
    model: Annotated[str, typer.Option(help="Default: the first that the server lists.")] = "",
    session: Annotated[str, typer.Option(help="Its id; default: a new one.")] = "",
    system: Annotated[
        str, typer.Option(help="Instructions for the model, before the conversation.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=0, help="Of an answer; 0 = the server's own.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=2, help="0 = always the likeliest; default: server's."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="The answers, and nothing else.")] = False,
) -> None:
    """Chat in the terminal, and see the session sleep and come back.

    After each answer a line says where the prompt's KV came from, how long the
    first token took and what state the session is in; /sleep, /wake, /pin, /info
    and others act on it (/help lists them). Input may be a pipe: each line is a
    message, and only answers go to standard output.
    """
    from launch.chat import ChatOptions
    from launch.chat import chat as run
    from launch.remote import Address

    options = ChatOptions(model, session, system, max_tokens, temperature, quiet)
    raise typer.Exit(run(Address(url, api_key), options))


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
    from launch.printing import console, print_json
    from launch.remote import Address
    from launch.top import ONCE_ROWS, snapshots, watch
    from launch.top_frame import FILTERS, ORDERS, frame

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
