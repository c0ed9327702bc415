"""The outermost middleware: every request passes it first, every answer last.

Plain ASGI. It gives the request an id, refuses requests that a web page made a browser send
(DNS rebinding, CSRF), adds the headers that every answer has, and answers unforeseen exceptions.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engines.http import ClientGone
from gateway.config import LOOPBACK
from gateway.edge.bodies import REPLACED_HEADER, BodyShare
from gateway.errors import ANTHROPIC_PATH, Failure, failure_of
from gateway.gateway import Gateway
from gateway.request.callers import RequestState, count

log = logging.getLogger("thermocline.gateway")

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left; counted, never sent
MAX_LOGGED_PATH = 200
_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
_OPERATORS_ROUTES = ("livez", "readyz", "health", "metrics", "dashboard_file")
_HEALTH = ("/livez", "/readyz", "/health", "/ping")
_COUNTED = ("/v1/", "/tokenize", "/detokenize")  # paths that count in a key's limits
_NAMING = ("/v1/sessions/", "/v1/models/")  # the name that follows may contain slashes


# ASGI extension: ``send`` before any middleware wrapped it, for the body of a stream between its
# head and its end. No middleware reads these messages, and six wrappers cost more than the relay.
BODY_SEND = "thermocline.body_send"


def body_send_of(scope: Scope, send: Send) -> Send:
    """Return the server's own ``send``, which skips all middleware; else ``send``."""
    found: Send = scope.get("extensions", {}).get(BODY_SEND, send)
    return found


class RequestMiddleware:
    """Gives every request an id, and checks, logs and counts it. See the module's text."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _plain(scope)
        path = scope["path"]
        headers = {  # a dict, since Starlette's ``Headers`` searches the list each time
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
        state = RequestState(_request_id(headers), headers, BodyShare(self._gateway.bodies))
        scope.setdefault("state", {})["request"] = state
        response = _TrackedResponse(send, state, path)
        scope.setdefault("extensions", {})[BODY_SEND] = send
        try:
            refusal = self._refusal(scope, headers)
            app = refusal.response_for(path, state.id) if refusal else self._app
            if refusal is None and path.startswith(_COUNTED):
                await count(self._gateway, scope)
            await app(scope, receive, response.send)
        except (ClientGone, ClientDisconnect):
            response.status = CLIENT_CLOSED_REQUEST
        except Exception as error:  # the edge of the process: for the log, not for the client
            log.exception("request %s failed", state.id)
            if response.status:
                raise
            answer = failure_of(error).response_for(path, state.id)
            await answer(scope, receive, response.send)
        finally:
            state.ended()
            self._done(scope, state, response)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> Failure | None:
        method, host = scope["method"], headers.get("host", "")
        if not host:
            if scope["path"] in _HEALTH:  # load balancers check by HTTP/1.0, without a Host
                return None
            return Failure(400, "A Host header is needed.", None, "host_missing")
        # No web page can reach a socket in the file system.
        on_socket = self._gateway.config.is_admin_socket(scope.get("server"))
        if not on_socket and not self._host_allowed(_host_name(host)):
            message = "This Host name is not allowed here. Allow it in gateway.allowed_hosts."
            return Failure(403, message, None, "host_not_allowed")
        origin = headers.get("origin")
        asks_first = "access-control-request-method" in headers  # a browser's preflight
        harmless = method in ("GET", "HEAD") or (method == "OPTIONS" and not asks_first)
        if origin and not harmless and not self._known(origin, host):
            message = "This origin is not allowed here. Allow it in gateway.allowed_origins."
            return Failure(403, message, None, "origin_not_allowed")
        return None

    def _host_allowed(self, name: str) -> bool:
        """Return whether the server may be called by this name.

        Without API keys the name is the only protection: a page from ``evil.example`` can make a
        browser send requests to this machine under that name (DNS rebinding). Other sites cannot
        do that with addresses, or with names without a dot.
        """
        if allowed := self._gateway.config.allowed_hosts:
            return name in allowed or name in LOOPBACK or _is_address(name)
        if self._gateway.config.on_loopback:
            return name in LOOPBACK
        return not self._gateway.tenants.open_to_all or "." not in name or _is_address(name)

    def _known(self, origin: str, host: str) -> bool:
        return origin in self._gateway.config.allowed_origins or urlsplit(origin).netloc == host

    def _done(self, scope: Scope, state: RequestState, response: _TrackedResponse) -> None:
        route = getattr(scope.get("endpoint"), "__name__", "other")
        self._gateway.metrics.answered(route, response.status)
        path = str(scope.get("raw_path") or scope["path"].encode(), "ascii", "replace")
        log.log(
            logging.DEBUG if route in _OPERATORS_ROUTES else logging.INFO,
            "%s %s %d %.1f ms request=%s",
            scope["method"],
            path[:MAX_LOGGED_PATH],
            response.status,
            response.age_ms,
            state.id,
            extra={"request_id": state.id, "session": state.session},
        )


class _TrackedResponse:
    """Passes a response on, adds the headers that all responses have, and notes its status."""

    def __init__(self, send: Send, state: RequestState, path: str) -> None:
        self._send = send
        self._state = state
        # Anthropic's clients read the request's id from a header of another name.
        self._anthropic = path.startswith(ANTHROPIC_PATH)
        self._began = time.perf_counter()
        self.status = 0

    @property
    def age_ms(self) -> float:
        return (time.perf_counter() - self._began) * 1000

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            state = self._state
            self.status = message["status"]
            place, id, num_replaced = state.place, state.id.encode(), state.num_replaced
            message["headers"] = [
                *message.get("headers", ()),
                *((x.encode(), y.encode()) for x, y in (place.headers() if place else ())),
                (b"x-request-id", id),
                (b"openai-processing-ms", b"%d" % self.age_ms),
            ]
            if self._anthropic:
                message["headers"].append((b"request-id", id))
            if num_replaced:
                message["headers"].append((REPLACED_HEADER.encode(), b"%d" % num_replaced))
        await self._send(message)


def _plain(scope: Scope) -> Scope:
    """Return a scope with GET for HEAD (the server drops the body), and no slash at the path's end.

    It is a copy if changed, as the server reads its own scope. A slash at the end of a name stays.
    """
    changed: dict[str, object] = {}
    if scope["method"] == "HEAD":
        changed["method"] = "GET"
    path: str = scope["path"]
    named = path.startswith(_NAMING)
    if path.endswith("/") and len(path) > 1 and not (named and path not in _NAMING):
        changed["path"] = path.rstrip("/") or "/"
    return {**scope, **changed} if changed else scope


def _request_id(headers: Mapping[str, str]) -> str:
    """Return the client's own id if it is safe in a log and a header, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """Return ``Host`` without its port and without the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
