"""One conversation with a server: its messages, its session, its latest turn."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import aiohttp

from launch.errors import LaunchError
from launch.remote.address import Address, words_of
from launch.remote.turn import Message, Turn, take_turn

BUSY_ROUNDS, BUSY_S = 20, 0.25
NO_SESSIONS = "this server has no sessions to look at; is it a Thermocline gateway?"


class Talk:
    """A conversation; an answer that failed or was stopped leaves it as it was."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        address: Address,
        model: str,
        *,
        session: str = "",
        system: str = "",
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self._fields = dict(fields or {})  # more of each request's body
        self._http = http
        self._address = address
        self._system = system
        self.session = ""
        self.messages: list[Message] = []
        self.begin(session)

    def begin(self, session: str = "") -> None:
        """Begin anew, in a session of its own."""
        self.session = session or f"chat-{secrets.token_hex(4)}"
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    async def ask(self, text: str, on_text: Callable[[str], None]) -> Turn:
        """Say ``text`` and read the answer. What goes wrong is in the turn."""
        said = {"role": "user", "content": text}
        turn = await take_turn(
            self._http,
            self._address,
            self.model,
            [*self.messages, said],
            session=self.session,
            fields=self._fields,
            on_text=on_text,
        )
        if turn.ok:
            self.messages += [said, {"role": "assistant", "content": turn.text}]
        return turn

    async def look(self) -> dict[str, Any] | None:
        """The session as the server sees it; None if it knows none of that name."""
        status, content = await self._address.get(self._http, self._path())
        return content if status == 200 and isinstance(content, dict) else None

    async def act(self, verb: str) -> dict[str, Any]:
        """Post ``verb`` for the session. Raises ``LaunchError`` if the server does not follow."""
        path = f"{self._path()}/{verb}"
        for _ in range(BUSY_ROUNDS):
            status, content = await self._address.ask(self._http, "POST", path, {})
            if status != 409:  # else what the last turn added is still being saved
                break
            await asyncio.sleep(BUSY_S)
        return _checked(status, content)

    async def forget(self) -> None:
        """Remove the session from every tier, and begin anew."""
        _checked(*await self._address.ask(self._http, "DELETE", self._path()))
        self.begin()

    def _path(self) -> str:
        return f"/v1/sessions/{quote(self.session, safe='')}"


def _checked(status: int, content: Any) -> dict[str, Any]:
    if status == 200 and isinstance(content, dict):
        return content
    if isinstance(content, dict) and "error" in content:
        raise LaunchError(f"{status}: {words_of(content)}")
    raise LaunchError(NO_SESSIONS)
