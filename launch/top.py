"""The loop of ``thermocline top``: one snapshot and one frame a second."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from launch.errors import LaunchError
from launch.remote import MOST_BYTES, Address, content_of
from launch.top_frame import FILTERS, MOST_TENANTS, ORDERS, frame, objects, part

PATH = "/v1/snapshot"
EVERY_S = 1.0
ANSWER_S = 10.0
ONCE_ROWS = 200
OTHER_LINES = 14  # of a frame, besides sessions
_MOST = 64  # bytes of one look: more are a paste


class Watched:
    """One model of a server, as it was last shown. ``trouble`` is the present trouble, in words."""

    def __init__(self, address: Address, model: str = "") -> None:
        """``model``: of several; "" = the only or first one."""
        self.said: dict[str, Any] = {}
        self.trouble = ""
        self._address = address
        self._query = {"model": model} if model else {}
        self._tag = ""

    async def ask(self, http: aiohttp.ClientSession) -> None:
        """Ask for a snapshot. Raises ``LaunchError``: the server refuses, or says nonsense."""
        url, timeout = self._address.base + PATH, aiohttp.ClientTimeout(total=ANSWER_S)
        headers = {**self._address.headers, "if-none-match": self._tag}
        async with http.get(url, params=self._query, headers=headers, timeout=timeout) as answer:
            if answer.status == 304:
                return
            raw = await answer.content.read(MOST_BYTES)
            while not answer.content.at_eof() and len(raw) < MOST_BYTES:
                raw += await answer.content.read(MOST_BYTES)
            self._tag = answer.headers.get("etag", "")
        if answer.status == 404:
            words = f"{self._address.base} has no {PATH}; is it a Thermocline of this version?"
            raise LaunchError(words)
        if answer.status != 200:
            raise self._address.refused(answer.status, content_of(raw))
        try:
            self.said = msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LaunchError(f"{self._address.base}{PATH} is no snapshot: {error}") from error

    async def try_to_ask(self, http: aiohttp.ClientSession) -> None:
        """Do as ``ask``; a server that does not answer now is trouble, and no error."""
        try:
            await self.ask(http)
            self.trouble = ""
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.trouble = f"not connected ({str(error) or type(error).__name__}); trying again"


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


async def _watched(address: Address, http: aiohttp.ClientSession) -> list[Watched]:
    try:
        return [Watched(address, name) for name in await models_of(address, http)]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise address.unreachable(error) from error


def snapshots(address: Address) -> list[dict[str, Any]]:
    """Ask a server what each of its models does now. Raises ``LaunchError`` if it does not say."""

    async def read() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as http:
            watched = await _watched(address, http)
            for model in watched:
                try:
                    await model.ask(http)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    raise address.unreachable(error) from error
            return [x.said for x in watched]

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
        self._pressed = asyncio.Event()
        self._quit = False

    async def run(self) -> None:
        with keys(self._key) as has_keys:
            async with aiohttp.ClientSession() as http:
                watched = await _watched(self._address, http)
                with Live(console=self._console, screen=True, auto_refresh=False) as live:
                    while not self._quit:
                        await asyncio.gather(*(x.try_to_ask(http) for x in watched))
                        await self._show(live, watched, has_keys)

    async def _show(self, live: Live, watched: list[Watched], has_keys: bool) -> None:
        """Show a frame for a second, and anew after each key."""
        loop = asyncio.get_running_loop()
        until = loop.time() + EVERY_S
        while not self._quit and loop.time() < until:
            self._pressed.clear()
            live.update(self._frame(watched, has_keys), refresh=True)
            try:
                async with asyncio.timeout_at(until):
                    await self._pressed.wait()
            except TimeoutError:
                return

    def _frame(self, watched: list[Watched], has_keys: bool) -> RenderableType:
        parts: list[RenderableType] = []
        lines = self._console.height // len(watched)
        for model in watched:
            used = OTHER_LINES + min(7, len(objects(part(model.said, "now").get("requests"))))
            used += min(MOST_TENANTS + 3, 2 * len(objects(model.said.get("tenants"))))
            shown = frame(
                model.said,
                order=self._order,
                kept=self._kept,
                most_rows=max(1, lines - used),
                trouble=model.trouble,
                keys=has_keys and model is watched[-1],
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
        self._pressed.set()


def _next(names: Mapping[str, Any], now: str) -> str:
    known = list(names)
    return known[(known.index(now) + 1) % len(known)]
