"""Simulated users: how fast any OpenAI server answers, and how many sessions it keeps.

    python -m benchmarks.users URL --preset users

Works with any server. If the server reports what it reused (x-thermocline-cache, or cached_tokens
in usage), times are grouped by that. Prompts are new in each run, so that nothing is reused by
chance. ``--preset`` names the workload. In ``chat``, ``--users`` users at once have ``--rounds``
conversations of ``--turns`` turns each, with a pause of ``--think`` before each turn but the first
and a beginning of ``--system-words`` words that all share. A message has ``--words`` words: 60, or
300 with ``--find-capacity``. The exit code is 1 if there were errors, and 130 after Ctrl-C, which
still prints the figures so far.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import aiohttp

from benchmarks.program import options_of
from benchmarks.users.capacity import BY_TIME, Found, Search
from benchmarks.users.figures import Run, Target, report_of
from benchmarks.users.workload import PRESETS, Habits, workload_of
from launch.errors import LaunchError, UsageError
from launch.printing import check_output, print_table, say, write_json
from launch.remote.server import Address
from launch.settings.units import parse_duration

INTERRUPTED: Final = 130  # the exit code of a program that Ctrl-C ended
_TIMES: Final = ("first token p50", "p90", "p99", "between tokens p50", "p90")
PHASES: Final = ("phase", "users", "requests", "errors", "tok/s", "per user", *_TIMES)
SOURCES: Final = ("prompt's KV", "requests", "prompt tokens", "reused", *_TIMES)
ROUNDS: Final = ("sessions", "came back", "first token, new", "first token, back", "from")
_MEANINGS: Final = {
    "new": "first turns, which have nothing to reuse",
    "miss": "returns of which nothing was reused",
    "cached": "reused; the server does not report from where",
    "unknown": "the server does not report what it reused",
}
_JUDGES: Final = {
    "header": "x-thermocline-cache",
    "usage": "usage.cached_tokens",
    BY_TIME: "time to first token (the server does not report what it reused)",
}


def played(play: Callable[[aiohttp.ClientSession], Awaitable[object]]) -> bool:
    """Run ``play`` with an HTTP client; return False if Ctrl-C interrupted it."""

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await play(http)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        say("interrupted; these are the figures so far", error=True)
        return False
    return True


def play_workload(target: Target, args: Namespace) -> int:
    """Play the workload of ``--preset`` and print its figures; return the exit code."""
    habits = Habits(
        args.words or 60, args.answer, args.turns, parse_duration(args.think), args.system_words
    )
    begun: dict[str, None] = {}

    def show(phase: str) -> None:
        if phase not in begun:
            say(f"  {phase}", error=True)
        begun[phase] = None

    run = Run(target, workload_of(args.preset, habits, args.users, args.rounds), show)
    report = report_of(run, finished=played(run.play))
    print_report(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))
    return int(bool(report["errors"])) if report["finished"] else INTERRUPTED


def find_capacity(target: Target, args: Namespace) -> int:
    """Search for the number of sessions that the server keeps; return the exit code."""
    sessions, words = (args.first_sessions, args.max_sessions), args.words or 300
    if min(sessions) < 1 or max(sessions) > 100_000 or not 8 <= words <= 200_000:
        raise UsageError("--first-sessions and --max-sessions: 1 to 100000; --words: 8 to 200000")
    search = Search(target, words=words, most=args.max_sessions, start=args.first_sessions)
    finished = played(search.run)
    print_found(search.found)
    if args.json:
        write_json(search.found, args.json)
    return 0 if finished else INTERRUPTED


def print_report(report: dict[str, Any]) -> None:
    done = f"{len(report['requests'])} requests"
    if not report["finished"]:
        done += f", interrupted; {report['planned_requests']} were planned"
    say(f"{report['workload']} against {report['model']} at {report['url']}: {done}")
    for head, rows, form in (
        (PHASES, report["phases"], ".1f"),
        (SOURCES, report["sources"], ".1%"),
    ):
        say()
        print_table(head, [_cells(x, form) for x in rows], right=head[1:])
    for row in report["sources"]:
        if meaning := _MEANINGS.get(row["source"]):
            say(f"{row['source']}: {meaning}")
    say(f"\nerrors: {sum(report['errors'].values())}")
    for words, count in report["errors"].items():
        say(f"  {count} x {words}")


def print_found(found: Found) -> None:
    say(f"sessions of {found.prompt_tokens} tokens and more that {found.url} keeps,")
    say(f"judged by {_JUDGES.get(found.judged_by, 'nothing yet')}:")
    rows = [
        [
            *(str(x.opened), str(x.kept), _seconds(x.first_ttft_s), _seconds(x.return_ttft_s)),
            ", ".join(f"{count} {source}" for source, count in sorted(x.sources.items())),
        ]
        for x in found.rounds
    ]
    print_table(ROUNDS, rows, right=ROUNDS[:4], empty="nothing was measured")
    most = " or more: none was lost" if found.at_least else ""
    say(f"capacity: {found.capacity} sessions{most}")


def _cells(row: dict[str, Any], form: str) -> list[str]:
    *figures, ttft, itl = row.values()
    shown = ["" if x is None else format(x, form if isinstance(x, float) else "") for x in figures]
    return [*shown, *map(_seconds, (*ttft, *itl[:2]))]


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; errors are printed as one sentence."""
    options = options_of(
        __doc__,
        f"--preset {'|'.join(PRESETS)} --users 4 --turns 3 --rounds 1 --think 0s --words 0"
        " --answer 32 --system-words 0 --find-capacity --first-sessions 4 --max-sessions 256"
        " --model '' --api-key '' --timeout 10m",
    )
    options.add_argument("url", nargs="?", default=os.environ.get("THERMOCLINE_URL", ""))
    args = options.parse_args(words)
    try:
        if args.json:
            check_output("--json", args.json)
        timeout_s = parse_duration(args.timeout)
        target = Target(Address(args.url, args.api_key), args.model, timeout_s)
        return find_capacity(target, args) if args.find_capacity else play_workload(target, args)
    except (LaunchError, ValueError) as error:
        say(f"error: {error}", error=True)
        return 1 if isinstance(error, LaunchError) and not isinstance(error, UsageError) else 2


if __name__ == "__main__":
    sys.exit(main())
