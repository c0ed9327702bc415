"""A running OpenAI server: its address, and one question to it with its answer in JSON."""

from __future__ import annotations

import os
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from launch.errors import LaunchError, UsageError
from launch.machine.server_address import address_here

_FIRST_ANSWER = aiohttp.ClientTimeout(total=30, sock_connect=5)
_MOST_BYTES = 4 << 20  # of an answer that is no stream
_SHOWN = 300  # characters of a server's own words


def server_url(given: str) -> str:
    """The URL of a server without a path: ``localhost:8080`` -> ``http://localhost:8080``.

    ``/v1``, which clients have at the end, may stand there. "" is the server that runs here.

    Raises:
        UsageError: it is no address.
    """
    given = given or address_here(os.environ)
    url = given.strip() if "://" in given else f"http://{given.strip()}"
    base = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(base)
        parts.port  # noqa: B018  # raises for a malformed port
    except ValueError:
        parts = urlsplit("")
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not base.isprintable()
        or given.startswith("unix:")
    ):
        raise UsageError(f"{given!r} is no address; write http://host:port")
    return base


def key_headers(api_key: str) -> dict[str, str]:
    """The header that carries a key, if there is one.

    Raises:
        UsageError: no header can hold it. It is not repeated.
    """
    if not all("!" <= character <= "~" for character in api_key):
        raise UsageError(
            "the API key holds a space, a line break or another character that no key has;"
            " look at THERMOCLINE_API_KEY, or --api-key"
        )
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


class Address:
    """One server, on behalf of one caller; see ``server_url``."""

    def __init__(self, url: str, api_key: str = "", name: str = "") -> None:
        """
        Args:
            name: of the server in messages; "" = its URL.

        Raises ``UsageError`` for a malformed address, and for a key that no header can hold.
        """
        self.base = server_url(url)
        self.name = name or self.base
        self.headers = key_headers(api_key)

    async def model(self, http: aiohttp.ClientSession, wanted: str = "") -> str:
        """Find the model to ask for: ``wanted`` if it is served, else the first one.

        Raises:
            LaunchError: no server answers, or it refuses.
            UsageError: there is no such model; says which there are.
        """
        status, content = await self.get(http, "/v1/models")
        if status == 404 and wanted:  # a server without the list
            return wanted
        if status != 200:
            raise self.refused(status, content)
        rows = content.get("data") if isinstance(content, dict) else None
        names = [
            x["id"] for x in rows or () if isinstance(x, dict) and isinstance(x.get("id"), str)
        ]
        if wanted in names or (wanted and not names):
            return wanted
        if wanted or not names:
            there = f"there are: {', '.join(names[:20])}" if names else "it lists none"
            raise UsageError(f"{self.name} serves no model {wanted!r}; {there} (--model)")
        return str(names[0])

    async def get(self, http: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
        return await self.ask(http, "GET", path)

    async def ask(
        self,
        http: aiohttp.ClientSession,
        method: str,
        path: str,
        body: Any = None,
        timeout: aiohttp.ClientTimeout = _FIRST_ANSWER,
    ) -> tuple[int, Any]:
        """Ask for JSON; returns status and content. Raises ``LaunchError`` if no server answers."""
        try:
            async with http.request(
                method, self.base + path, json=body, headers=self.headers, timeout=timeout
            ) as answer:
                raw = await answer.content.read(_MOST_BYTES)
                while len(raw) < _MOST_BYTES and (piece := await answer.content.read(_MOST_BYTES)):
                    raw += piece
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeError) as error:
            raise self.unreachable(error) from error
        if len(raw) >= _MOST_BYTES:
            raise LaunchError(f"{self.name} gives an answer of more than {_MOST_BYTES >> 20} MiB")
        return answer.status, content_of(raw)

    def unreachable(self, error: BaseException) -> LaunchError:
        return LaunchError(
            f"{self.name} does not answer ({reason_of(error)}); is `thermocline serve` or another"
            f" server running there? Name another address with --url"
        )

    def refused(self, status: int, content: Any) -> LaunchError:
        """The error for an answer that is no success."""
        said = words_of(content)
        if status in (401, 403):
            return LaunchError(
                f"{self.name} wants another API key ({status}: {said}); give it with --api-key or"
                " THERMOCLINE_API_KEY"
            )
        if status == 404:
            return LaunchError(f"{self.name} is no OpenAI server ({status}: {said})")
        return LaunchError(f"{self.name} refuses ({status}: {said})")


def reason_of(error: BaseException) -> str:
    """Say in a few plain words why a connection failed."""
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(cause, socket.gaierror | UnicodeError):
        is_known = getattr(cause, "errno", None) != socket.EAI_AGAIN
        return "no such host" if is_known else "the host's name cannot be looked up now"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS connection: {(cause.reason or 'refused').replace('_', ' ').lower()}"
    if isinstance(cause, aiohttp.ServerDisconnectedError | ConnectionResetError):
        return "the connection was closed"
    if isinstance(cause, aiohttp.ClientResponseError):
        return "the answer is no HTTP"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno).lower()
    return str(error) or type(error).__name__


def words_of(content: Any, most: int = _SHOWN) -> str:
    """The server's own words in an error's body, cut to a line of ``most`` characters."""
    error = content.get("error") if isinstance(content, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    text = str(error if error is not None else content).strip()
    return " ".join(text.split())[:most] or "no reason given"


def content_of(raw: bytes) -> Any:
    """The JSON of an answer's body; its text if it is none."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw.decode("utf-8", "replace")
