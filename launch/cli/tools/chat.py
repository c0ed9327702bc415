"""``thermocline chat``: a chat in the terminal that shows the state of its session."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.cli.sessions import DEFAULT_URL, Key, Url


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
    from launch.chat.program import ChatOptions
    from launch.chat.program import chat as run
    from launch.remote.address import Address

    options = ChatOptions(model, session, system, max_tokens, temperature, quiet)
    raise typer.Exit(run(Address(url, api_key), options))
