"""The loop of ``thermocline top``: one frame a second, or whenever something changes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from launch.errors import LaunchError
from launch.remote import ERROR_BYTES, Address, NotEvents, content_of, events_of
from launch.top_frame import FILTERS, ORDERS, Unreadable, View, frame, objects

PATH = "/v1/events"
AGAIN_S = 2.0
_SILENCE_S = 60.0  # the server says something every 15 s
_MOST = 64  # bytes of one look: more are a paste
REFRESH_S = 1.0
OTHER_LINES = 14  # of a frame, besides sessions
ONCE_ROWS = 200


class EventReader:
    """Reads events into ``view``. ``trouble`` is the present trouble, in words."""

    def __init__(
        self, address: Address, view: View, on_change: Callable[[], None], model: str = ""
    ) -> None:
        """``model``: of several; "" = the only or first one."""
        self.trouble = ""
        self._query = {"model": model} if model else {}
        self._address = address
        self._view = view
        self._on_change = on_change

    async def once(self, http: aiohttp.ClientSession) -> None:
        """Read until the first snapshot. Raises ``LaunchError``: there is no such stream."""
        async with asyncio.timeout(_SILENCE_S):
            try:
                await self._read(http, until_known=True)
            except (aiohttp.ClientError, OSError, NotEvents, Unreadable) as error:
                raise self._address.unreachable(error) from error
        if not self._view.known:
            raise LaunchError(f"{self._address.base}{PATH} ended without a snapshot")

    async def keep(self, http: aiohttp.ClientSession) -> None:
        """Read for ever. Raises ``LaunchError`` if the server refuses."""
        while True:
            try:
                await self._read(http)
                self.trouble = "the stream ended; trying again"
            except (aiohttp.ClientError, TimeoutError, OSError, NotEvents, Unreadable) as error:
                reason = str(error) or type(error).__name__
                self.trouble = f"not connected ({reason}); trying again"
            self._on_change()
            await asyncio.sleep(AGAIN_S)

    async def _read(self, http: aiohttp.ClientSession, *, until_known: bool = False) -> None:
        headers = {**self._address.headers, "accept": "text/event-stream"}
        if self._view.last_id:
            headers["last-event-id"] = self._view.last_id
        silence = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_SILENCE_S)
        url = self._address.base + PATH
        async with http.get(url, params=self._query, headers=headers, timeout=silence) as answer:
            if answer.status != 200:
                raise self._refused(answer.status, await answer.content.read(ERROR_BYTES))
            self.trouble = ""
            async for event in events_of(answer.content):
                self._view.apply(event.name, event.data, event.id)
                self._on_change()
                if event.name == "end" or (until_known and self._view.known):
                    return

    def _refused(self, status: int, raw: bytes) -> LaunchError:
        if status == 404:
            return LaunchError(
                f"{self._address.base} has no {PATH}; is it a Thermocline gateway of this version?"
            )
        return self._address.refused(status, content_of(raw))


async def models_of(address: Address, http: aiohttp.ClientSession) -> list[str]:
    """List the names of a server's models; [""] where there is one, or they cannot be listed."""
    _, content = await address.get(http, "/v1/models")
    rows = objects(content.get("data")) if isinstance(content, dict) else []
    names = list(dict.fromkeys(str(x["root"]) for x in rows if x.get("root")))
    return names if len(names) > 1 else [""]


@contextmanager
def keys(on_key: Callable[[str], None]) -> Iterator[bool]:
    """Call ``on_key`` for each key inside the block; yields False where there is no keyboard.

    Runs on the event loop. The terminal is as it was when the block ends.
    """
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def look() -> None:
        typed = os.read(descriptor, _MOST)
        if not typed:  # the terminal is gone
            on_key("q")
        for key in typed.decode(errors="replace"):
            on_key(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, look)
    try:
        yield True
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


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
