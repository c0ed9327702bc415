"""Keeps a view up to date from a server's events, and comes back when their stream breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import msgspec

from launch.errors import LaunchError
from launch.remote.address import Address
from launch.remote.event_lines import NotEvents, events_of
from launch.top.view import Unreadable, View, objects

PATH = "/v1/events"
AGAIN_S = 2.0
_SILENCE_S = 60.0  # the server says something every 15 s
_ERROR_BYTES = 64 << 10


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
                raise self._refused(answer.status, await answer.content.read(_ERROR_BYTES))
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
        try:
            content = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            content = raw.decode("utf-8", "replace")
        return self._address.refused(status, content)


async def models_of(address: Address, http: aiohttp.ClientSession) -> list[str]:
    """List the names of a server's models; [""] where there is one, or they cannot be listed."""
    _, content = await address.get(http, "/v1/models")
    rows = objects(content.get("data")) if isinstance(content, dict) else []
    names = list(dict.fromkeys(str(x["root"]) for x in rows if x.get("root")))
    return names if len(names) > 1 else [""]
