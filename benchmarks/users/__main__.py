"""Simulated users: how fast any OpenAI server answers, and how many sessions it keeps.

python -m benchmarks.users URL --preset users
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.cli.sessions import Key
from launch.errors import LaunchError, UsageError
from launch.printing import say

if TYPE_CHECKING:
    from benchmarks.users.target import Target

INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended


def bench(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", envvar="THERMOCLINE_URL", help="Any server that speaks OpenAI's chat."
        ),
    ] = "",
    preset: Annotated[
        str, typer.Option(help="Who asks what: chat, agents, users, stress or seeds (both).")
    ] = "chat",
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="How many sessions until returns are lost?")
    ] = False,
    users: Annotated[int, typer.Option(help="Of chat and agents: users at once.")] = 4,
    turns: Annotated[int, typer.Option(help="Of chat and agents: turns of a conversation.")] = 3,
    rounds: Annotated[int, typer.Option(help="Of chat: conversations of a user.")] = 1,
    think: Annotated[str, typer.Option(metavar="TIME", help="A pause before each return.")] = "0s",
    words: Annotated[
        int | None, typer.Option(help="Of a message [60; with --find-capacity 300].")
    ] = None,
    answer: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 32,
    system_words: Annotated[int, typer.Option(help="Of a text in front that all share.")] = 0,
    first_sessions: Annotated[
        int, typer.Option(help="Of --find-capacity: open so many at first.")
    ] = 4,
    max_sessions: Annotated[int, typer.Option(help="Of --find-capacity: stop there.")] = 256,
    model: Annotated[str, typer.Option(help="Default: the first that the server lists.")] = "",
    api_key: Key = "",
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Of one request.")] = "10m",
    json: Annotated[Path | None, typer.Option(metavar="OUT", help="Write all figures.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Draw it; .svg and .pdf work, too.")
    ] = None,
) -> None:
    """Measure an OpenAI server: first tokens, throughput, what returning sessions cost.

    Works against any server. Where it says what it reused (x-thermocline-cache,
    or cached_tokens in usage) times are grouped by that. Prompts are new in each
    run, so that nothing is reused by chance. The exit code is 1 if there were
    errors, and 130 after Ctrl-C, which still prints what is known.
    """
    from benchmarks.drawing import check_outputs
    from benchmarks.users.program import draw_report, print_report, run_workload
    from benchmarks.users.target import Target
    from benchmarks.users.workload import Habits, workload_of
    from launch.printing import write_json
    from launch.remote.address import Address

    check_outputs(json, plot)
    target = Target(Address(url, api_key), model, _seconds("--timeout", timeout))
    if find_capacity:
        _find_capacity(target, words or 300, (first_sessions, max_sessions), json, plot)
        return
    habits = Habits(words or 60, answer, turns, _seconds("--think", think), system_words)
    report = run_workload(target, workload_of(preset, habits, users, rounds))
    print_report(report)
    if json is not None:
        write_json(report, json)
    if plot is not None and report.requests:
        draw_report(report, plot)
    if not report.finished:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(1 if report.num_errors else 0)


def _find_capacity(
    target: Target, words: int, sessions: tuple[int, int], json: Path | None, plot: Path | None
) -> None:
    from benchmarks.users.program import draw_found, print_found, run_search
    from launch.printing import write_json

    first, most = sessions
    if min(sessions) < 1 or max(sessions) > 100_000 or not 8 <= words <= 200_000:
        raise UsageError("--first-sessions and --max-sessions: 1 to 100000; --words: 8 to 200000")
    found = run_search(target, words=words, most=most, start=first)
    print_found(found)
    if json is not None:
        write_json(found, json)
    if plot is not None and found.rounds:
        draw_found(found, plot)
    if not found.finished:
        raise typer.Exit(INTERRUPTED)


def _seconds(option: str, text: str) -> float:
    from launch.settings.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def main() -> None:
    """Run the command; what is wrong with it is said in one sentence."""
    try:
        typer.run(bench)
    except LaunchError as error:
        say(f"error: {error}", error=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
