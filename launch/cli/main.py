"""The command ``thermocline``.

Options that are settings are declared as parameters, but only ``options.chosen`` reads them.
A failed command prints one sentence on standard error; the exit code is 2 for a wrong request and 1
for one that could not be carried out.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from launch.cli import options, running_server
from launch.cli.plan import plan
from launch.cli.running_server import Url, chat, connect, top
from launch.errors import LaunchError, UsageError
from launch.machine.folders import URL_VARIABLE
from launch.printing import print_json, print_table, say
from launch.settings.schema import flat, masked
from launch.settings.units import shown

# Settings that ``config`` shows for each engine, if there are several.
OF_EACH_ENGINE = (
    *("engine.model", "engine.hot_bytes", "store.ram_bytes", "store.disk_bytes", "store.disk_path"),
)

app = typer.Typer(
    name="thermocline",
    help="Serves a language model to many chats; the quiet ones sleep packed and wake up fast.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


app.add_typer(running_server.app, name="sessions")
app.add_typer(running_server.keys_app, name="keys", no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"thermocline {version('thermocline')}")
        raise typer.Exit


@app.callback()
def thermocline(
    wanted: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Handle the options that belong to no command."""


@app.command()
def serve(
    context: typer.Context,
    model: options.Models = None,
    engine: Annotated[
        str | None,
        typer.Option(help="mlx, vllm, fake, attached or module:Attr; default: by the hardware."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[str | None, typer.Option(help="Port to listen on; 0 = any free one.")] = None,
    sessions: options.Sessions = None,
    session_context: options.SessionContext = None,
    hot: options.Hot = None,
    ram: options.Ram = None,
    disk: options.Disk = None,
    redis: Annotated[
        str | None, typer.Option(metavar="URL", help="Redis server for cold KV.")
    ] = None,
    codec: options.Codec = None,
    idle_after: Annotated[
        str | None, typer.Option(metavar="TIME", help="Idle time until a session sleeps.")
    ] = None,
    api_keys: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File of keys, as `thermocline keys new` makes."),
    ] = None,
    allow_anonymous: Annotated[
        bool | None,
        typer.Option("--allow-anonymous", help="Let other machines call without API keys."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name for clients.")
    ] = None,
    engine_url: Annotated[
        str | None, typer.Option(help="Address of a running engine to attach to.")
    ] = None,
    engine_control: Annotated[
        str | None,
        typer.Option(help="The engine's control address: unix:/path or tcp://host:port."),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of the secret and of cold sessions.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="Level of the log: debug, info, warning or error.")
    ] = None,
    profile: options.Profile = None,
    config: options.Config = None,
    assignments: options.Assignments = None,
) -> None:
    """Start the gateway and its engine; stop with Ctrl-C.

    Give the capacity in sessions (--sessions 200 --context 8192) or in bytes
    (--hot, --ram, --disk); settings that are not given are fitted to this
    machine.
    """
    from launch.serve.run import serve as run

    effective = options.fitted(context, os.environ)
    raise typer.Exit(run(effective, os.environ, lambda: options.chosen(context, os.environ)))


@app.command("config")
def show_config(
    context: typer.Context,
    model: options.Models = None,
    profile: options.Profile = None,
    config: options.Config = None,
    assignments: options.Assignments = None,
    as_json: options.Json = False,
) -> None:
    """Show the settings that would be used here, and where each comes from."""
    effective = options.fitted(context, os.environ)
    resolved = effective.resolved
    rows = {name: masked(name, value) for name, value in flat(resolved.settings).items()}
    if as_json:
        print_json({k: {"value": v, "from": resolved.origin(k)} for k, v in rows.items()})
        return
    print_table(
        ("setting", "value", "from"),
        [(name, shown(name, value), resolved.origin(name)) for name, value in rows.items()]
        + [
            (f"of {x.entry.name}: {name}", shown(name, value), x.effective.resolved.origin(name))
            for x in effective.engines
            for name, value in flat(x.effective.settings).items()
            if name in OF_EACH_ENGINE
        ],
    )


app.command()(plan)


@app.command()
def doctor(
    context: typer.Context,
    model: options.Models = None,
    url: Url = "",
    profile: options.Profile = None,
    config: options.Config = None,
    assignments: options.Assignments = None,
    as_json: options.Json = False,
) -> None:
    """Look for problems that would keep a server from starting or make it slow."""
    from launch.doctor import examine
    from launch.remote.server import server_url

    environ = {**os.environ, **({URL_VARIABLE: server_url(url)} if url else {})}
    findings = examine(options.chosen(context, environ), environ)
    if as_json:
        print_json(findings)
    else:
        print_table(("", "about", "finding"), [(x.verdict, x.about, x.text) for x in findings])
    raise typer.Exit(1 if any(x.verdict == "failure" for x in findings) else 0)


@app.command()
def calibrate(
    context: typer.Context,
    model: options.Model = None,
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text to learn from; may be repeated.")
    ] = None,
    eval_text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text to judge by; may be repeated.")
    ] = None,
    presets: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Codecs to measure, or a group: ours, usual, all."),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Tokens to pack and restore; default: 2048,6144."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="OUT", help="File for the results, as JSON.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Let the server at this address measure its model, in idle moments."),
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="THERMOCLINE_API_KEY", help="An admin key, for --url.")
    ] = "",
    profile: options.Profile = None,
    config: options.Config = None,
    assignments: options.Assignments = None,
) -> None:
    """Measure what each codec costs this model. Takes minutes."""
    from gateway.watch.telemetry import configure_logging
    from launch.calibrate.program import CalibrateOptions
    from launch.calibrate.program import calibrate as run
    from launch.cli.calibrate import RowPrinter, measure_served
    from launch.printing import check_output, write_json
    from launch.remote.server import Remote

    if json is not None:
        check_output("--json", json)
    rows = RowPrinter()
    if url is not None:
        own = (text, eval_text, presets, contexts, profile, config, assignments)
        if any(own):
            raise UsageError(
                "with --url the server measures the model that it serves: leave out all"
                " options but --api-key, --model and --json"
            )
        remote = Remote(url, api_key, model or "")
        report = measure_served(remote, lambda words: say(words, error=True), rows.print_rows)
    else:
        chosen = CalibrateOptions(text or (), eval_text or (), presets, contexts)
        effective = options.chosen(context, os.environ)
        configure_logging(effective.settings.log_level, effective.settings.log_format)
        report = run(effective, chosen, os.environ, rows.print_rows)
    rows.print_report(report)
    if json is not None:
        write_json(report, json)
    if url is None and not report.profile:
        raise LaunchError("what was learned is not kept; the lines above say why")


# In the order in which --help lists them.
for command in (chat, top):
    app.command()(command)
app.command(no_args_is_help=True)(connect)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack some of our characters
    try:
        app()
    except LaunchError as error:
        say(f"error: {error}", error=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        say(f"error: the output cannot be written: {error.strerror}", error=True)
        sys.exit(1)
