"""A running server: its address, single requests to it, and a client of our gateway's own API."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from engines.wire import CodecReport
from kvstore.codecs.names import EXACT
from launch.errors import LaunchError, UsageError
from launch.machine.folders import address_here, server_address

_FIRST_ANSWER = aiohttp.ClientTimeout(total=30, sock_connect=5)
_MOST_BYTES = 4 << 20  # of an answer that is not streamed
_SHOWN = 300  # characters of a server's message that are shown
MOST_WORDS = 4000  # characters of a refusal that are shown, since it may list many errors
# A demote may have to write to a slow tier before it is answered.
TIMEOUT = aiohttp.ClientTimeout(total=120.0, sock_connect=5)


def server_url(given: str) -> str:
    """Return the URL of a server, without a path: ``localhost:8080`` -> ``http://localhost:8080``.

    ``given`` may end in ``/v1``, as in clients' settings. "" = the server that runs here.

    Raises:
        UsageError: ``given`` is not an HTTP address.
    """
    given = given or address_here(os.environ)
    url = given.strip() if "://" in given else f"http://{given.strip()}"
    base = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(base)
        parts.port  # noqa: B018  # raises for a malformed port
    except ValueError:
        parts = urlsplit("")
    is_http = parts.scheme in ("http", "https") and parts.hostname and base.isprintable()
    if not is_http or given.startswith("unix:"):
        raise UsageError(f"{given!r} is no address; write http://host:port")
    return base


def key_headers(api_key: str) -> dict[str, str]:
    """Return the header for an API key; no header if the key is "".

    Raises:
        UsageError: a header cannot hold the key. The message does not show it.
    """
    if not all("!" <= character <= "~" for character in api_key):
        raise UsageError(
            "the API key holds a space, a line break or another character that no key has;"
            " look at THERMOCLINE_API_KEY, or --api-key"
        )
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


class Address:
    """The URL of one server, with the caller's API key."""

    def __init__(self, url: str, api_key: str = "", name: str = "") -> None:
        """
        Args:
            url: as for ``server_url``.
            name: the server's name in messages; "" = its URL.

        Raises ``UsageError`` for a malformed address, and for a key that no header can hold.
        """
        self.base = server_url(url)
        self.name = name or self.base
        self.headers = key_headers(api_key)

    async def model(self, http: aiohttp.ClientSession, wanted: str = "") -> str:
        """Return the name of the model to use: ``wanted``, or for "" the first that is listed.

        Raises:
            LaunchError: no server answers, or it refuses.
            UsageError: the server does not list ``wanted``; the message names the listed models.
        """
        status, content = await self.ask(http, "GET", "/v1/models")
        if status == 404 and wanted:  # this server does not list its models
            return wanted
        if status != 200:
            raise self.refused(status, content)
        rows = content.get("data") if isinstance(content, dict) else None
        found = [x.get("id") for x in rows or () if isinstance(x, dict)]
        names = [x for x in found if isinstance(x, str)]
        if wanted in names or (wanted and not names):
            return wanted
        if wanted or not names:
            there = f"there are: {', '.join(names[:20])}" if names else "it lists none"
            raise UsageError(f"{self.name} serves no model {wanted!r}; {there} (--model)")
        return names[0]

    async def ask(
        self,
        http: aiohttp.ClientSession,
        method: str,
        path: str,
        body: Any = None,
        timeout: aiohttp.ClientTimeout = _FIRST_ANSWER,
    ) -> tuple[int, Any]:
        """Send a request; return the status and the content of the answer (see ``content_of``).

        Raises ``LaunchError`` if no server answers.
        """
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
            raise LaunchError(f"{self.name} sent an answer of more than {_MOST_BYTES >> 20} MiB")
        return answer.status, content_of(raw)

    def unreachable(self, error: BaseException) -> LaunchError:
        return LaunchError(
            f"{self.name} does not answer ({reason_of(error)}); is `thermocline serve` or another"
            f" server running there? Name another address with --url"
        )

    def refused(self, status: int, content: Any) -> LaunchError:
        """Return the error for an answer with an error status."""
        said = f"({status}: {words_of(content)})"
        if status in (401, 403):
            return LaunchError(
                f"{self.name} wants another API key {said}; give it with --api-key or"
                " THERMOCLINE_API_KEY"
            )
        what = "is no OpenAI server" if status == 404 else "refuses"
        return LaunchError(f"{self.name} {what} {said}")


def reason_of(error: BaseException) -> str:
    """Return the reason why a connection failed, in a few plain words."""
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
    """Return the server's message in an error's body as one line of at most ``most`` characters."""
    error = content.get("error") if isinstance(content, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    text = str(error if error is not None else content).strip()
    return " ".join(text.split())[:most] or "no reason given"


def content_of(raw: bytes) -> Any:
    """Return an answer's body parsed as JSON, or as text if it is not JSON."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw.decode("utf-8", "replace")


class Remote:
    """A client of one gateway, with the caller's API key. Every method blocks.

    Raises (all methods):
        LaunchError: the gateway is not reachable, or it refused; then the message is its own.
    """

    def __init__(self, url: str, api_key: str = "", model: str = "") -> None:
        """
        Args:
            url: as for ``server_url``, or ``unix:/path``.
            model: the model whose sessions and codecs are asked for; "" = all models, and for
                codecs the default one.

        Raises ``UsageError`` for a malformed address, and for a key that no header can hold.
        """
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else ""
        name = url if self._socket else ""
        self._address = Address("http://localhost" if self._socket else url, api_key, name)
        self.name = self._address.name
        self._model = f"model={quote(model, safe='')}" if model else ""

    def models(self) -> list[dict[str, Any]]:
        """Return the models that the server lists, the default one first."""
        return self._rows("/v1/models")

    def sessions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None:
            since = f"after={quote(after, safe='')}&" if after else ""
            listed = self._ask("GET", f"/v1/sessions?{since}{self._model}")
            rows = listed.get("data")
            if not isinstance(rows, list) or not all(
                isinstance(x, dict) and "idle_s" in x for x in rows
            ):
                raise LaunchError(
                    f"{self.name} is not a Thermocline gateway: it lists other sessions"
                )
            found += rows
            after = listed.get("next") or None
        return found

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
        """Return the server's API keys by their ids; needs an admin key."""
        return self._rows("/admin/keys")

    def _rows(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("GET", path)["data"]
        return found

    def codec(self) -> CodecReport | None:
        """Return the engine's report on its codecs and their cost; None while it is away."""
        found = self._ask("GET", f"/v1/sessions?limit=1&{self._model}").get("codec")
        try:
            return None if found is None else msgspec.convert(found, CodecReport)
        except msgspec.ValidationError as error:
            raise LaunchError(f"{self.name} is of another version: {error}") from error

    def measure(self) -> str:
        """Have the engine measure its codecs; return its progress. Needs an admin key."""
        return str(self._ask("POST", f"/admin/measure?{self._model}", {}).get("progress", ""))

    def make_key(self, tenant: str) -> dict[str, Any]:
        """Make and return a key, which no later answer shows again. Needs an admin key."""
        return self._ask("POST", "/admin/keys", {"tenant": tenant})

    def revoke(self, key_id: str) -> dict[str, Any]:
        return self._ask("DELETE", f"/admin/keys/{quote(key_id, safe='')}")

    def _of_session(
        self, method: str, session_id: str, verb: str = "", body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send a request for one session. An error names it, since a command may have several."""
        if session_id in ("", ".", ".."):  # as part of a path they would name the list of sessions
            raise UsageError(f"{session_id!r} is no session's id")
        path = f"/v1/sessions/{quote(session_id, safe='')}{verb}?{self._model}"
        return self._ask(method, path, body, f"{session_id}: ")

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Send a request; return the status and the content of the answer."""

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
    """A list of sessions, of which only the report on codecs is read."""

    object: Literal["list"]
    codec: CodecReport | None


def describe_server(environ: Mapping[str, str]) -> str:
    """Return one line about the gateway that commands use by default; "" if none answers."""
    remote = Remote(server_address(environ), environ.get("THERMOCLINE_API_KEY", ""))
    try:
        status, content = remote.ask("GET", "/v1/sessions?limit=1")
        if status == 401:
            return f"{remote.name} answers, and wants a key (THERMOCLINE_API_KEY)"
        codec = msgspec.convert(content, _Answer).codec
    except (LaunchError, msgspec.ValidationError):  # no server answers, or not a gateway of ours
        return ""
    if codec is None:
        return f"{remote.name} answers, and its engine is away"
    how = "stores sessions exactly" if codec.name == EXACT else f"packs sessions with {codec.name}"
    return f"{remote.name} {how}: {codec.progress or codec.why}"
