"""The loop of ``thermocline top``: one frame a second, or whenever something changes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
from rich.console import Console
from rich.live import Live

from launch.remote.address import Address
from launch.top.frame import frame
from launch.top.keys import keys
from launch.top.reader import EventReader
from launch.top.view import FILTERS, ORDERS, View, objects

REFRESH_S = 1.0
OTHER_LINES = 14  # of a frame, besides sessions
ONCE_ROWS = 200


def snapshot(address: Address) -> View:
    """Ask a server what it does now. Raises ``LaunchError`` if it does not say."""
    view = View()

    async def read() -> None:
        async with aiohttp.ClientSession() as http:
            await EventReader(address, view, lambda: None).once(http)

    asyncio.run(read())
    return view


def watch(address: Address, console: Console, order: str, kept: str) -> None:
    """Show frames until q or Ctrl-C. Raises ``LaunchError`` if the server refuses."""
    asyncio.run(_Screen(address, console, order, kept).run())


class _Screen:
    """The live view, and what the keys have chosen."""

    def __init__(self, address: Address, console: Console, order: str, kept: str) -> None:
        self._view = View()
        self._console = console
        self._order = order
        self._kept = kept
        self._changed = asyncio.Event()
        self._quit = False
        self._reader = EventReader(address, self._view, self._changed.set)

    async def run(self) -> None:
        async with aiohttp.ClientSession() as http:
            reading = asyncio.create_task(self._reader.keep(http))
            reading.add_done_callback(lambda _: self._changed.set())
            try:
                with keys(self._key) as has_keys:
                    await self._show(reading, has_keys)
            finally:
                reading.cancel()
        if reading.done() and not reading.cancelled():
            reading.result()  # raises what the server refused

    async def _show(self, reading: asyncio.Task[None], has_keys: bool) -> None:
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            while not self._quit and not reading.done():
                self._changed.clear()
                live.update(self._frame(has_keys), refresh=True)
                try:
                    await asyncio.wait_for(self._changed.wait(), REFRESH_S)
                except TimeoutError:
                    continue
                await asyncio.sleep(0)

    def _frame(self, has_keys: bool) -> Any:
        used = OTHER_LINES + min(7, len(objects(self._view.part("now").get("requests"))))
        return frame(
            self._view,
            order=self._order,
            kept=self._kept,
            most_rows=max(1, self._console.height - used),
            trouble=self._reader.trouble,
            keys=has_keys,
            width=self._console.width,
        )

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
