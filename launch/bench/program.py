"""Runs a benchmark with a progress bar; Ctrl-C ends it with the results so far."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import aiohttp
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from launch.bench.capacity import Found, Search
from launch.bench.figures import Report, Result, Run, report_of
from launch.bench.workload import Workload
from launch.remote import Address


@dataclass(frozen=True)
class Target:
    """The server under test."""

    address: Address
    model: str  # "" = the first that it lists
    timeout_s: float  # of one request


class Bar:
    """A progress bar on standard error; nothing where that is no terminal."""

    def __init__(self, total: int | None) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, *times, console=console, transient=True)
        self._task: TaskID | None = None
        self._total = total
        self._shown = console.is_terminal

    def show(self) -> AbstractContextManager[object]:
        return self._progress if self._shown else nullcontext()

    def step(self, what: str) -> None:
        if not self._shown:
            return
        if self._task is None:
            self._task = self._progress.add_task(what, total=self._total)
        self._progress.update(self._task, advance=1, description=what)


def run_workload(target: Target, workload: Workload, temperature: float = 0.0) -> Report:
    """Play ``workload`` and report the results, also after Ctrl-C.

    Raises:
        UsageError, LaunchError: the server cannot be used; says why.
    """
    bar = Bar(sum(1 for _ in workload.steps()))
    run: Run | None = None
    model = target.model

    def on_result(result: Result) -> None:
        bar.step(result.phase)

    async def play(http: aiohttp.ClientSession) -> None:
        nonlocal run, model
        model = await target.address.model(http, target.model)
        run = Run(
            target.address,
            model,
            workload,
            timeout_s=target.timeout_s,
            temperature=temperature,
            on_result=on_result,
        )
        await run.play(http)

    finished = _until_interrupted(play, bar)
    results, walls = (run.results, run.walls) if run else ([], {})
    planned = sum(1 for _ in workload.steps())
    return report_of(
        target.address.base, model, workload.name, planned, results, walls, finished=finished
    )


def run_search(target: Target, make: Callable[[str, Callable[[str], None]], Search]) -> Found:
    """Search for the capacity; what is known so far after Ctrl-C.

    Args:
        make: makes the search for a model and something that hears of its turns.

    Raises:
        UsageError, LaunchError: see ``run_workload``.
    """
    bar = Bar(None)
    search: Search | None = None

    async def play(http: aiohttp.ClientSession) -> None:
        nonlocal search
        search = make(await target.address.model(http, target.model), bar.step)
        await search.run(http)

    _until_interrupted(play, bar)
    return search.found if search else Found(target.address.base, target.model, 0)


def _until_interrupted(play: Callable[[aiohttp.ClientSession], Awaitable[None]], bar: Bar) -> bool:
    """Run ``play``; False if it was interrupted."""

    async def main() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            await play(http)

    try:
        with bar.show():
            asyncio.run(main())
    except KeyboardInterrupt:
        print("interrupted; this is what is known so far", file=sys.stderr)
        return False
    return True
