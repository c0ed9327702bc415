"""The loop of ``thermocline top``: one frame a second, or whenever something changes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from launch.remote.address import Address
from launch.top.frame import frame
from launch.top.keys import keys
from launch.top.reader import EventReader, models_of
from launch.top.view import FILTERS, ORDERS, View, objects

REFRESH_S = 1.0
OTHER_LINES = 14  # of a frame, besides sessions
ONCE_ROWS = 200


def snapshots(address: Address) -> list[View]:
    """Ask a server what each of its models does now. Raises ``LaunchError`` if it does not say."""

    async def read() -> list[View]:
        async with aiohttp.ClientSession() as http:
            views = {name: View() for name in await models_of(address, http)}
            for name, view in views.items():
                await EventReader(address, view, lambda: None, name).once(http)
            return list(views.values())

    return asyncio.run(read())


def watch(address: Address, console: Console, order: str, kept: str) -> None:
    """Show frames until q or Ctrl-C. Raises ``LaunchError`` if the server refuses."""
    asyncio.run(_Screen(address, console, order, kept).run())


class _Screen:
    """The live view, and the choices made by keys."""

    def __init__(self, address: Address, console: Console, order: str, kept: str) -> None:
        self._address = address
        self._console = console
        self._order = order
        self._kept = kept
        self._changed = asyncio.Event()
        self._quit = False
        self._views: list[tuple[View, EventReader]] = []  # one for each model

    async def run(self) -> None:
        async with aiohttp.ClientSession() as http:
            for name in await models_of(self._address, http):
                view = View()
                reader = EventReader(self._address, view, self._changed.set, name)
                self._views.append((view, reader))
            reading = [asyncio.create_task(x.keep(http)) for _, x in self._views]
            for task in reading:
                task.add_done_callback(lambda _: self._changed.set())
            try:
                with keys(self._key) as has_keys:
                    await self._show(reading, has_keys)
            finally:
                for task in reading:
                    task.cancel()
        for task in reading:
            if task.done() and not task.cancelled():
                task.result()  # raises what the server refused

    async def _show(self, reading: list[asyncio.Task[None]], has_keys: bool) -> None:
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            while not self._quit and not any(x.done() for x in reading):
                self._changed.clear()
                live.update(self._frame(has_keys), refresh=True)
                try:
                    await asyncio.wait_for(self._changed.wait(), REFRESH_S)
                except TimeoutError:
                    continue
                await asyncio.sleep(0)

    def _frame(self, has_keys: bool) -> RenderableType:
        parts: list[RenderableType] = []
        lines = self._console.height // len(self._views)
        for i, (view, reader) in enumerate(self._views):
            used = OTHER_LINES + min(7, len(objects(view.part("now").get("requests"))))
            shown = frame(
                view,
                order=self._order,
                kept=self._kept,
                most_rows=max(1, lines - used),
                trouble=reader.trouble,
                keys=has_keys and i == len(self._views) - 1,
                width=self._console.width,
            )
            parts += [Text(), shown] if parts else [shown]
        return Group(*parts)

    def _key(self, key: str) -> None:
        if key in "qQ\x1b":
            self._quit = True
        elif key == "s":
            self._order = _next(ORDERS, self._order)
        elif key == "f":
            self._kept = _next(FILTERS, self._kept)
        self._changed.set()


def _next(names: Mapping[str, Any], now: str) -> str:
    known = list(names)
    return known[(known.index(now) + 1) % len(known)]
