"""A client of a running gateway's HTTP API: its sessions, models, keys and codec."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import quote

import aiohttp
import msgspec

from engines.wire import CodecReport
from kvstore.codecs.names import EXACT
from launch.errors import LaunchError
from launch.machine.server_address import server_address
from launch.remote.address import Address, words_of

# A demote may have to write to a slow tier first.
MOST_WORDS = 4000  # characters of a refusal, which lists all that is wrong
TIMEOUT = aiohttp.ClientTimeout(total=120.0, sock_connect=5)


class Remote:
    """A connection to one gateway on behalf of one caller. Every method blocks.

    Raises (all methods):
        LaunchError: not reachable, or it refused; with the gateway's own words.
    """

    def __init__(self, url: str, api_key: str = "", model: str = "") -> None:
        """
        Args:
            url: as ``server_url`` takes it, or ``unix:/path``.
            model: one of several that are served there, whose sessions and codecs are meant.

        Raises ``UsageError`` for a malformed address, and for a key that no header can hold.
        """
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else ""
        name = url if self._socket else ""
        self._address = Address("http://localhost" if self._socket else url, api_key, name)
        self.name = self._address.name
        self._model = f"model={quote(model, safe='')}" if model else ""

    def models(self) -> list[dict[str, Any]]:
        """The models that the server lists, the served one first."""
        found: list[dict[str, Any]] = self._ask("GET", "/v1/models")["data"]
        return found

    def sessions(self) -> list[dict[str, Any]]:
        listed = self._page_of_sessions("")
        found: list[dict[str, Any]] = listed["data"]
        while following := listed.get("next"):
            listed = self._page_of_sessions(f"after={quote(following, safe='')}&")
            found += listed["data"]
        return found

    def _page_of_sessions(self, after: str) -> dict[str, Any]:
        listed = self._ask("GET", f"/v1/sessions?{after}{self._model}")
        rows = listed.get("data")
        if isinstance(rows, list) and all(isinstance(x, dict) and "idle_s" in x for x in rows):
            return listed
        raise LaunchError(f"{self.name} is not a Thermocline gateway: it lists other sessions")

    def session(self, session_id: str) -> dict[str, Any]:
        return self._of_session("GET", session_id)

    def act(
        self, verb: str, session_id: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Post ``verb`` (demote, prefetch, pin or unpin) for a session; returns the session."""
        return self._of_session("POST", session_id, f"/{verb}", body or {})

    def forget(self, session_id: str) -> dict[str, Any]:
        return self._of_session("DELETE", session_id)

    def keys(self) -> list[dict[str, Any]]:
        """The server's API keys by their ids; needs an admin key."""
        found: list[dict[str, Any]] = self._ask("GET", "/admin/keys")["data"]
        return found

    def codec(self) -> CodecReport | None:
        """The codecs that the engine packs with, and their cost; None while it is away."""
        found = self._ask("GET", f"/v1/sessions?limit=1&{self._model}").get("codec")
        try:
            return None if found is None else msgspec.convert(found, CodecReport)
        except msgspec.ValidationError as error:
            raise LaunchError(f"{self.name} is of another version: {error}") from error

    def measure(self) -> str:
        """Have the engine measure its codecs; says how far it is. It needs an admin key."""
        return str(self._ask("POST", f"/admin/measure?{self._model}", {}).get("progress", ""))

    def make_key(self, tenant: str) -> dict[str, Any]:
        """Make a key; the answer is the only one that shows it. It needs an admin key."""
        return self._ask("POST", "/admin/keys", {"tenant": tenant})

    def revoke(self, key_id: str) -> dict[str, Any]:
        return self._ask("DELETE", f"/admin/keys/{quote(key_id, safe='')}")

    def _of_session(
        self, method: str, session_id: str, verb: str = "", body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Ask about one session; a refusal names it, since a command may name several."""
        path = f"/v1/sessions/{quote(session_id, safe='')}{verb}?{self._model}"
        return self._ask(method, path, body, f"{session_id}: ")

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Return the status of an answer, and its content."""

        async def request() -> tuple[int, Any]:
            connector = aiohttp.UnixConnector(self._socket) if self._socket else None
            async with aiohttp.ClientSession(connector=connector) as http:
                return await self._address.ask(http, method, path, body, TIMEOUT)

        return asyncio.run(request())

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, subject: str = ""
    ) -> dict[str, Any]:
        status, content = self.ask(method, path, body)
        if not isinstance(content, dict):
            raise LaunchError(f"{self.name} is not a Thermocline gateway: no JSON object")
        if status >= 400:
            raise LaunchError(f"{subject}{status}: {words_of(content, MOST_WORDS)}")
        return content


class _Answer(msgspec.Struct):
    """The part of a list of sessions that says how they are packed."""

    object: Literal["list"]
    codec: CodecReport | None


def ask_server(environ: Mapping[str, str]) -> str:
    """Return one line on the server of ours that commands ask; "" if there is none."""
    remote = Remote(server_address(environ), environ.get("THERMOCLINE_API_KEY", ""))
    try:
        status, content = remote.ask("GET", "/v1/sessions?limit=1")
        if status == 401:
            return f"{remote.name} answers, and wants a key (THERMOCLINE_API_KEY)"
        codec = msgspec.convert(content, _Answer).codec
    except (LaunchError, msgspec.ValidationError):  # no one answers, or a server of another kind
        return ""
    if codec is None:
        return f"{remote.name} answers, and its engine is away"
    words = (
        "stores sessions exactly" if codec.name == EXACT else f"packs sessions with {codec.name}"
    )
    return f"{remote.name} {words}: {codec.progress or codec.why}"
