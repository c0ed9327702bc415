"""Runs a benchmark with a progress bar, prints and draws what it found; Ctrl-C ends it early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.drawing import drawing, finish
from benchmarks.users.capacity import BY_TIME, Found, Search
from benchmarks.users.figures import (
    Percentiles,
    PhaseFigures,
    Report,
    Run,
    SourceFigures,
    report_of,
)
from benchmarks.users.target import Target
from benchmarks.users.workload import Workload, crowd_name
from launch.printing import print_table, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TIMES: Final = ("first token p50", "p90", "p99", "between tokens p50", "p90")
PHASES: Final = ("phase", "users", "requests", "errors", "tok/s", "per user", *_TIMES)
SOURCES: Final = ("prompt's KV", "requests", "prompt tokens", "reused", *_TIMES)
ROUNDS: Final = ("sessions", "came back", "first token, new", "first token, back", "from")
_MEANINGS: Final = {
    "new": "first turns, of which nothing could be known",
    "miss": "returns of which nothing was reused",
    "cached": "reused; the server does not say from where",
    "unknown": "the server does not say what it reused",
}
BLUE: Final = "#2e86ab"
RED: Final = "#d1495b"


class Bar(Progress):
    """A progress bar on standard error; nothing where that is no terminal."""

    def __init__(self, total: int | None) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        hidden = not console.is_terminal
        super().__init__(*columns, *times, console=console, transient=True, disable=hidden)
        self._total = total

    def step(self, what: str) -> None:
        if not self.task_ids:
            self.add_task(what, total=self._total)
        self.update(self.task_ids[0], advance=1, description=what)


def run_workload(target: Target, workload: Workload) -> Report:
    """Play ``workload`` and report the results, also after Ctrl-C.

    Raises:
        UsageError, LaunchError: the server cannot be used; says why.
    """
    bar = Bar(workload.num_steps)
    run = Run(target, workload, lambda result: bar.step(result.phase))
    finished = _until_interrupted(run.play, bar)
    return report_of(run, finished=finished)


def run_search(target: Target, *, words: int, most: int, start: int) -> Found:
    """Search for the capacity; what is known so far after Ctrl-C. Args: see ``Search``.

    Raises:
        UsageError, LaunchError: see ``run_workload``.
    """
    bar = Bar(None)
    search = Search(target, words=words, most=most, start=start, on_turn=bar.step)
    _until_interrupted(search.run, bar)
    return search.found


def _until_interrupted(
    play: Callable[[aiohttp.ClientSession], Awaitable[object]], bar: Bar
) -> bool:
    """Run ``play``; False if it was interrupted."""

    async def main() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            await play(http)

    try:
        with bar:
            asyncio.run(main())
    except KeyboardInterrupt:
        say("interrupted; this is what is known so far", error=True)
        return False
    return True


def print_report(report: Report) -> None:
    done = len(report.requests)
    state = "" if report.finished else f", interrupted after {done} of {report.planned_requests}"
    say(f"{report.workload} against {report.model} at {report.url}: {done} requests{state}")
    if not report.requests:
        return
    say()
    print_table(PHASES, [_phase(x) for x in report.phases], right=PHASES[1:])
    say()
    print_table(SOURCES, [_source(x) for x in report.sources], right=SOURCES[1:])
    for source in report.sources:
        if meaning := _MEANINGS.get(source.source):
            say(f"{source.source}: {meaning}")
    say(f"\nerrors: {report.num_errors}")
    for words, count in report.errors.items():
        say(f"  {count} x {words}")


def print_found(found: Found) -> None:
    say(
        f"sessions of {found.prompt_tokens} tokens and more that {found.url} keeps, judged by"
        f" {_judge(found)}:"
    )
    rows = [
        [
            str(x.opened),
            str(x.kept),
            _seconds(x.first_ttft_s),
            _seconds(x.return_ttft_s),
            ", ".join(f"{count} {source}" for source, count in sorted(x.sources.items())),
        ]
        for x in found.rounds
    ]
    print_table(ROUNDS, rows, right=ROUNDS[:4], empty="nothing was measured")
    if found.rounds:
        most = " or more: none was lost" if found.at_least else ""
        say(f"capacity: {found.capacity} sessions{most}")
    if not found.finished:
        say("interrupted: there may be more")


def _judge(found: Found) -> str:
    if found.judged_by == BY_TIME:
        return "time to first token (the server does not say what it reused)"
    return {"header": "x-thermocline-cache", "usage": "usage.cached_tokens"}[found.judged_by]


def _phase(x: PhaseFigures) -> list[str]:
    speed = [f"{x.tokens_per_s:.1f}", f"{x.tokens_per_s_user:.1f}"]
    return [
        x.name,
        str(x.users),
        str(x.requests),
        str(x.errors),
        *speed,
        *_times(x.ttft_s, x.itl_s),
    ]


def _source(x: SourceFigures) -> list[str]:
    share = "" if x.reused_share is None else f"{x.reused_share:.1%}"
    counts = [str(x.requests), str(x.prompt_tokens), share]
    return [x.source, *counts, *_times(x.ttft_s, x.itl_s)]


def _times(ttft: Percentiles, itl: Percentiles) -> list[str]:
    return [_seconds(x) for x in (ttft.p50, ttft.p90, ttft.p99, itl.p50, itl.p90)]


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def draw_report(report: Report, path: Path) -> None:
    """Draw a run. Raises ``LaunchError`` if the file cannot be written."""
    with drawing(path, (10, 4)) as figure:
        left, right = figure.subplots(1, 2)
        crowds = [x for x in report.phases if x.name == crowd_name(x.users)]
        if len(crowds) > 1:
            _draw_speed(left, crowds)
        else:
            _draw_phases(left, report.phases)
        _draw_sources(right, report)
        figure.suptitle(f"{report.workload}: {report.model}", fontsize=10)


def draw_found(found: Found, path: Path) -> None:
    """Draw sessions that came back against sessions that were open."""
    with drawing(path, (5, 4)) as figure:
        axes = figure.subplots()
        opened = [0, *(x.opened for x in found.rounds)]
        axes.plot(opened, opened, color="#999", lw=1, ls="--", label="all of them")
        axes.plot(opened, [0, *(x.kept for x in found.rounds)], "o-", color=BLUE, label="came back")
        axes.set(
            xlabel="sessions opened",
            ylabel="sessions that came back",
            title=f"{found.model}: capacity",
        )
        finish(axes)


def _draw_speed(axes: Axes, crowds: Sequence[PhaseFigures]) -> None:
    users = [x.users for x in crowds]
    axes.plot(users, [x.tokens_per_s for x in crowds], "o-", color=BLUE, label="all users")
    axes.plot(users, [x.tokens_per_s_user for x in crowds], "s-", color=RED, label="each user")
    axes.set(xlabel="users at once", ylabel="tokens of answers per second", ylim=(0, None))
    axes.set_title("throughput", fontsize=10)
    finish(axes)


def _draw_phases(axes: Axes, phases: Sequence[PhaseFigures]) -> None:
    axes.barh([x.name for x in phases], [x.tokens_per_s for x in phases], color=BLUE)
    axes.invert_yaxis()
    axes.set(xlabel="tokens of answers per second")
    axes.set_title("throughput", fontsize=10)
    axes.grid(axis="x", alpha=0.3)


def _draw_sources(axes: Axes, report: Report) -> None:
    shown = [x for x in report.sources if x.ttft_s.p50 is not None]
    names = [f"{x.source} ({x.requests})" for x in shown]
    middle = [x.ttft_s.p50 or 0.0 for x in shown]
    slow = [max(0.0, (x.ttft_s.p90 or 0.0) - (x.ttft_s.p50 or 0.0)) for x in shown]
    axes.barh(names, middle, color=BLUE, xerr=[[0.0] * len(shown), slow], ecolor="#555", capsize=3)
    axes.invert_yaxis()
    axes.set(xlabel="seconds to the first token: median, and 90th percentile")
    axes.set_title("by where the prompt's KV came from", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
