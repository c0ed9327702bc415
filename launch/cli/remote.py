"""A client of a running gateway's HTTP API, for ``thermocline sessions`` and ``connect``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from engines.wire import CodecReport
from launch.errors import LaunchError
from launch.remote import key_headers, server_url

TIMEOUT_S = 120.0  # a demote may have to write to a slow tier first


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
        self._url = "http://localhost" if self._socket else server_url(url)
        self._headers = key_headers(api_key)
        self._model = f"model={quote(model, safe='')}" if model else ""

    def models(self) -> list[dict[str, Any]]:
        """The models that the server lists, the served one first."""
        found: list[dict[str, Any]] = self._ask("GET", "/v1/models")["data"]
        return found

    def sessions(self) -> list[dict[str, Any]]:
        listed = self._ask("GET", f"/v1/sessions?{self._model}")
        found: list[dict[str, Any]] = listed["data"]
        while following := listed.get("next"):
            after = f"after={quote(following, safe='')}&"
            listed = self._ask("GET", f"/v1/sessions?{after}{self._model}")
            found += listed["data"]
        return found

    def session(self, session_id: str) -> dict[str, Any]:
        return self._ask("GET", self._path(session_id))

    def act(
        self, verb: str, session_id: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Post ``verb`` (demote, prefetch, pin or unpin) for a session; returns the session."""
        return self._ask("POST", self._path(session_id, f"/{verb}"), body or {})

    def forget(self, session_id: str) -> dict[str, Any]:
        return self._ask("DELETE", self._path(session_id))

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
            raise LaunchError(f"{self._url} is of another version: {error}") from error

    def measure(self) -> str:
        """Have the engine measure its codecs; says how far it is. It needs an admin key."""
        return str(self._ask("POST", f"/admin/measure?{self._model}", {}).get("progress", ""))

    def make_key(self, tenant: str) -> dict[str, Any]:
        """Make a key; the answer is the only one that shows it. It needs an admin key."""
        return self._ask("POST", "/admin/keys", {"tenant": tenant})

    def revoke(self, key_id: str) -> dict[str, Any]:
        return self._ask("DELETE", f"/admin/keys/{quote(key_id, safe='')}")

    def _path(self, session_id: str, verb: str = "") -> str:
        return f"/v1/sessions/{quote(session_id, safe='')}{verb}?{self._model}"

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            return asyncio.run(self._request(method, path, body))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise LaunchError(
                f"{self._url} does not answer ({reason}); is `thermocline serve` running there?"
                " Name another address with --url"
            ) from error
        except ValueError as error:
            raise LaunchError(f"{self._url} is not a Thermocline gateway: {error}") from error

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=5)
        async with (
            aiohttp.ClientSession(
                headers=self._headers,
                timeout=timeout,
                connector=aiohttp.UnixConnector(self._socket) if self._socket else None,
            ) as http,
            http.request(method, self._url + path, json=body) as answer,
        ):
            content = await answer.json(content_type=None)
            if not isinstance(content, dict):
                raise ValueError("its answer is no JSON object")
            if answer.status >= 400:
                raise LaunchError(f"{answer.status}: {_message(content)}")
            return content


def _message(content: Mapping[str, Any]) -> str:
    error = content.get("error")
    return str(error.get("message")) if isinstance(error, dict) else "refused without a reason"
