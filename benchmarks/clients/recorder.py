"""A proxy between a client and the server that records status, session and tokens of exchanges."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

TIMEOUT_S = 900.0
_NOT_OURS = frozenset({"host", "connection", "transfer-encoding", "content-length", "keep-alive"})
_OPENER = build_opener(ProxyHandler({}))  # uses no proxy of the environment


@dataclass
class Exchange:
    """One request and its response."""

    method: str
    path: str
    status: int = 0
    session: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""  # the server's message, as an answer or inside a stream

    @property
    def is_turn(self) -> bool:
        return self.prompt_tokens > 0


@dataclass
class Recorder:
    """The exchanges of a proxy, in the order in which they ended, and its addresses."""

    target: str
    exchanges: list[Exchange] = field(default_factory=list)
    url: str = ""


@contextmanager
def recording(target: str) -> Iterator[Recorder]:
    """Run a proxy in front of ``target`` until the context ends; yield its recorder."""
    recorder = Recorder(target)

    class Relay(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            _relay(recorder, self)

        do_POST = do_DELETE = do_HEAD = do_OPTIONS = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
    server.daemon_threads = True
    recorder.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield recorder
    finally:
        server.shutdown()
        server.server_close()


def _relay(recorder: Recorder, client: BaseHTTPRequestHandler) -> None:
    exchange = Exchange(client.command, client.path)
    body = client.rfile.read(int(client.headers.get("content-length") or 0))
    headers = {k: v for k, v in client.headers.items() if k.lower() not in _NOT_OURS}
    headers["accept-encoding"] = "identity"
    asked = Request(recorder.target + client.path, body or None, headers, method=client.command)
    seen = b""
    try:
        try:
            upstream = _OPENER.open(asked, timeout=TIMEOUT_S)
        except HTTPError as refusal:
            upstream = refusal
        with upstream:
            exchange.status = upstream.status
            exchange.session = upstream.headers.get("x-thermocline-session", "")
            _send_head(client, upstream)
            while piece := upstream.read1(65536):
                seen += piece
                try:
                    client.wfile.write(piece)
                    client.wfile.flush()
                except OSError:  # the client went away in the middle
                    break
    except OSError as error:
        exchange.error = f"{type(error).__name__}: {error}"
    client.close_connection = True
    _judge(exchange, seen)
    recorder.exchanges.append(exchange)


def _send_head(client: BaseHTTPRequestHandler, upstream: Any) -> None:
    client.send_response(upstream.status)
    for name, value in upstream.headers.items():
        if name.lower() not in _NOT_OURS:
            client.send_header(name, value)
    client.send_header("connection", "close")
    client.end_headers()


def _judge(exchange: Exchange, answer: bytes) -> None:
    """Add to ``exchange`` the token counts and errors of an answer in any dialect."""
    for line in [answer, *answer.splitlines()]:
        try:
            said = json.loads(line.removeprefix(b"data:"))
        except ValueError:
            continue
        if isinstance(said, dict):
            _count(exchange, said)
            failed = said.get("error") or (said.get("response") or {}).get("error")
            if failed and not exchange.error:
                exchange.error = json.dumps(failed)[:300]
    if exchange.status >= 400 and not exchange.error:
        exchange.error = answer[:300].decode("utf-8", "replace")


def _count(exchange: Exchange, said: dict[str, Any]) -> None:
    usage = said.get("usage") or (said.get("response") or {}).get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    read = usage.get("cache_read_input_tokens") or 0  # Anthropic's, not part of input_tokens
    prompt = usage.get("prompt_tokens") or usage.get("input_tokens") or 0
    if prompt or read:
        created = usage.get("cache_creation_input_tokens") or 0
        exchange.prompt_tokens = prompt + read + created
        exchange.cached_tokens = read or details.get("cached_tokens") or 0
