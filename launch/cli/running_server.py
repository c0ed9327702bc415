"""Commands for a running server: ``sessions``, ``keys``, ``chat``, ``top`` and ``connect``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from gateway.keys import BadKeyLine, generate_key
from kvstore.session import TIER_NAMES
from launch.cli.options import Json
from launch.errors import LaunchError, UsageError
from launch.machine.folders import URL_VARIABLE
from launch.printing import console, print_json, print_table, say
from launch.settings.units import show_bytes, show_duration

if TYPE_CHECKING:
    from launch.remote.server import Remote


class _ListByDefault(TyperGroup):
    """A group of commands that runs ``list`` if no command is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_alone = not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names)
        if is_alone and not ctx.resilient_parsing:  # shell completion has to see the commands
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_ListByDefault)
keys_app = typer.Typer(help="API keys.")

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar=URL_VARIABLE,
        help="The gateway's address.",
        show_default="that of the server which runs here",
    ),
]
Key = Annotated[
    str,
    typer.Option(
        "--api-key", envvar="THERMOCLINE_API_KEY", help="The API key, if the server needs one."
    ),
]
OfModel = Annotated[str, typer.Option("--model", help="One of several served models.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Session ids.")]


@app.callback()
def sessions() -> None:
    """List, move, pin and forget the sessions of a running server; without a command: list."""


@app.command("list")
def list_sessions(
    url: Url = "", api_key: Key = "", model: OfModel = "", as_json: Json = False
) -> None:
    """List all sessions of the caller, the most recent first."""
    rows = sorted(_remote(url, api_key, model).sessions(), key=lambda row: float(row["idle_s"]))
    _show(rows, as_json)


@app.command()
def show(
    ids: Ids, url: Url = "", api_key: Key = "", model: OfModel = "", as_json: Json = False
) -> None:
    """Show one session or several."""
    remote = _remote(url, api_key, model)
    _show([remote.session(x) for x in ids], as_json)


@app.command()
def demote(
    ids: Ids,
    tier: Annotated[str | None, typer.Option(help="Also move the cold copy: ram, disk, redis.")] = (
        None
    ),
    url: Url = "",
    api_key: Key = "",
    model: OfModel = "",
    as_json: Json = False,
) -> None:
    """Put sessions to sleep now."""
    if tier is not None and tier not in TIER_NAMES:
        raise UsageError(f"there is no tier {tier!r}; there are: {', '.join(TIER_NAMES)}")
    remote, body = _remote(url, api_key, model), {"tier": tier} if tier else {}
    _show([remote.act("demote", x, body) for x in ids], as_json)


def _add_verb(verb: str, words: str) -> None:
    def carry_out(
        ids: Ids, url: Url = "", api_key: Key = "", model: OfModel = "", as_json: Json = False
    ) -> None:
        remote = _remote(url, api_key, model)
        _show([remote.act(verb, x) for x in ids], as_json)

    app.command(verb, help=words)(carry_out)


_add_verb("prefetch", "Wake sessions before their next turn.")
_add_verb("pin", "Keep sessions from being evicted.")
_add_verb("unpin", "Let pinned sessions be evicted again.")


@app.command()
def forget(ids: Ids, url: Url = "", api_key: Key = "", model: OfModel = "") -> None:
    """Remove sessions from every tier for good, for all models or only for --model."""
    remote = _remote(url, api_key, model)
    for session_id in ids:
        remote.forget(session_id)
        say(f"forgotten: {session_id}")


def _remote(url: str, api_key: str, model: str = "") -> Remote:
    """Make the client. The import is here since it would double the time of ``--help``."""
    from launch.remote.server import Remote

    return Remote(url, api_key, model)


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    columns = ["id", "model", "state", "copy", "tokens", "bytes", "idle", "pinned"]
    cells = [
        [
            row["id"],
            row["model"],
            row["state"],
            row["tier"] or "-",
            str(row["tokens"]),
            show_bytes(row["bytes"]),
            show_duration(row["idle_s"]),
            "yes" if row.get("pinned") else "",  # not known of another server's session
        ]
        for row in rows
    ]
    if len({row["model"] for row in rows}) < 2:  # the column would not distinguish anything
        for line in (columns, *cells):
            del line[1]
    print_table(columns, cells, right=("tokens", "bytes", "idle"), empty="no sessions")


def chat(
    url: Url = "",
    api_key: Key = "",
    model: Annotated[
        str, typer.Option(help="The served model; default: the first that the server lists.")
    ] = "",
    session: Annotated[str, typer.Option(help="The session's id; default: a new one.")] = "",
    system: Annotated[
        str, typer.Option(help="Instructions for the model, before the conversation.")
    ] = "",
    max_tokens: Annotated[
        int, typer.Option(min=0, help="The most tokens of an answer; 0 = the server's default.")
    ] = 512,
    temperature: Annotated[
        float,
        typer.Option(min=0, max=2, help="Temperature of sampling; 0 = always the likeliest token."),
    ] = 0.0,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print the answers and nothing else.")
    ] = False,
) -> None:
    """Chat in the terminal, and see the session sleep and come back.

    After each answer a line says where the prompt's KV came from, how long the
    first token took and the state of the session; /sleep, /wake, /pin, /info
    and others act on it (/help lists them). Input may be a pipe: each line is a
    message, and only answers go to standard output.
    """
    from launch.remote.chat import ChatOptions
    from launch.remote.chat import chat as run
    from launch.remote.server import Address

    options = ChatOptions(model, session, system, max_tokens, temperature, quiet)
    raise typer.Exit(run(Address(url, api_key), options))


def top(
    url: Url = "",
    api_key: Key = "",
    sort: Annotated[str, typer.Option(help="Order: recent, tokens, bytes or saved.")] = "recent",
    only: Annotated[
        str, typer.Option(help="Sessions to show: all, awake, asleep, pinned or tasks.")
    ] = "all",
    once: Annotated[bool, typer.Option("--once", help="Print one frame.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the snapshot as JSON.")] = False,
) -> None:
    """Watch a running server: requests, memory, sessions as they sleep and come back.

    With several models each has its own part. It changes nothing; Ctrl-C ends it.
    Without a terminal it prints one frame.
    """
    import asyncio

    from launch.remote.server import Address
    from launch.remote.top import FILTERS, ONCE_ROWS, ORDERS, fetch_snapshots, frame, watch

    for option, given, known in (("--sort", sort, ORDERS), ("--only", only, FILTERS)):
        if given not in known:
            raise UsageError(f"{option} {given}: it is one of {', '.join(known)}")
    screen, address = console(), Address(url, api_key)
    if as_json:
        found = asyncio.run(fetch_snapshots(address))
        print_json(found[0] if len(found) == 1 else found)
    elif once or not screen.is_terminal:
        for snapshot in asyncio.run(fetch_snapshots(address)):
            screen.print(frame(snapshot, order=sort, kept=only, most_rows=ONCE_ROWS))
    else:
        try:
            watch(address, screen, sort, only)
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


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
    named: Annotated[
        str, typer.Option("--model", help="The served model; default: the first that is loaded.")
    ] = "",
    write: Annotated[
        bool, typer.Option("--write", help="Merge the settings into the client's own file.")
    ] = False,
) -> None:
    """Show what an agent, a chat page or an editor needs to use a running server."""
    from gateway.clients.needs import NO_KEY, Server
    from gateway.clients.table import client_of, connection
    from launch.cli import client_file
    from launch.remote.server import server_url  # pulls in the HTTP client

    base = server_url(url)  # raises for a unix socket, which agents cannot use
    try:
        client_of(client)
    except LookupError as error:
        raise UsageError(error.args[0]) from error
    models = _remote(base, api_key).models()
    if named:
        there = ", ".join(str(x["id"]) for x in models)
        if not (models := [x for x in models if x["id"] == named]):
            raise UsageError(f"{base} serves no model {named!r}; there are: {there}")
    # Take a loaded model, since the context of others may not be known yet.
    model = next((x for x in models if x["max_model_len"]), None)
    if model is None:
        raise UsageError(
            f"{models[0]['id']} is not loaded, and its context not known: send it a chat first"
        )
    server = Server(base, str(model["id"]), int(model["max_model_len"]), api_key or NO_KEY)
    try:
        needs = connection(client, server, Path.home())
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


@keys_app.command("list")
def list_keys(url: Url = "", api_key: Key = "", as_json: Json = False) -> None:
    """List the keys of a running server by their ids; needs an admin key."""
    rows = _remote(url, api_key).keys()
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


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[
        str, typer.Argument(metavar="ID", help="The key's id, as `thermocline keys list` shows it.")
    ],
    url: Url = "",
    api_key: Key = "",
) -> None:
    """Revoke a key of a running server, from the next request on; needs an admin key."""
    _remote(url, api_key).revoke(key_id)
    say(f"revoked: {key_id}")


@keys_app.command("new")
def new_key(
    tenant: Annotated[str, typer.Argument(help="The tenant whose sessions the key opens.")],
    append: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the key's line to this file (0600).")
    ] = None,
    url: Annotated[
        str, typer.Option(help="Let this running server make and keep the key; needs an admin key.")
    ] = "",
    api_key: Key = "",
) -> None:
    """Make an API key. It is shown once; the server keeps only its hash."""
    if url:
        if append is not None:
            raise UsageError("--append and --url exclude each other: a server keeps its own file")
        made = _remote(url, api_key).make_key(tenant)
        say(f"key:  {made['key']}")
        say(f"id:   {made['id']}")
        return
    try:
        key, line = generate_key(tenant)
    except BadKeyLine:
        raise UsageError(
            f"{tenant!r} cannot be a tenant's name: use up to 64 letters, digits, '.', '_' and '-',"
            " beginning with a letter or digit"
        ) from None
    if append is not None:
        _append_line(append, line)
    say(f"key:  {key}")
    say(f"line: {line}")
    if append is None:
        say("Put the line into a file and start with: thermocline serve --api-keys FILE")


def _append_line(file: Path, line: str) -> None:
    """Add ``line``; a new file is readable by its owner only. Raises ``LaunchError``."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b") as stream:
            held = stream.read()
            separator = b"" if not held or held.endswith(b"\n") else b"\n"
            stream.write(separator + line.encode() + b"\n")
    except OSError as error:
        raise LaunchError(f"the key file {file} cannot be written: {error.strerror}") from error


def _limits(row: dict[str, Any]) -> str:
    limits: dict[str, int] = row["limits"] or {}
    return " ".join(f"{name}={number}" for name, number in limits.items() if number)
