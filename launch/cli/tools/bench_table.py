"""Prints what a benchmark found as tables."""

from __future__ import annotations

from typing import Final

from launch.bench.capacity import BY_TIME, Found
from launch.bench.figures import Percentiles, PhaseFigures, Report, SourceFigures
from launch.cli.printing import print_table

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


def print_report(report: Report) -> None:
    done = len(report.requests)
    state = "" if report.finished else f", interrupted after {done} of {report.planned_requests}"
    print(f"{report.workload} against {report.model} at {report.url}: {done} requests{state}")
    if not report.requests:
        return
    print()
    print_table(PHASES, [_phase(x) for x in report.phases], right=PHASES[1:])
    print()
    print_table(SOURCES, [_source(x) for x in report.sources], right=SOURCES[1:])
    for source in report.sources:
        if meaning := _MEANINGS.get(source.source):
            print(f"{source.source}: {meaning}")
    print(f"\nerrors: {report.num_errors}")
    for words, count in report.errors.items():
        print(f"  {count} x {words}")


def print_found(found: Found) -> None:
    print(
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
        print(f"capacity: {found.capacity} sessions{most}")
    if not found.finished:
        print("interrupted: there may be more")


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
