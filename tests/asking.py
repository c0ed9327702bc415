"""One HTTP request to a server under test, and its answer; a server of one answer."""

from __future__ import annotations

import json
import socketserver
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    content: Any  # what JSON stands for, or a text


def asked(
    url: str,
    body: Any = None,
    *,
    method: str | None = None,
    key: str = "",
    session: str = "",
    timeout_s: float = 120.0,
) -> Answer:
    """Ask with this API key, for a turn of this session; an error is an answer, too."""
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    if session:
        headers["x-session-id"] = session
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        answer = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        content = answer.read().decode()
    is_json = "json" in (answer.headers["content-type"] or "")
    return Answer(answer.status, dict(answer.headers), json.loads(content) if is_json else content)


@contextmanager
def saying(raw: bytes) -> Iterator[str]:
    """The address of a server that answers every request with these bytes."""

    class Says(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(raw)

    with socketserver.TCPServer(("127.0.0.1", 0), Says) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def http_ok(content: bytes) -> bytes:
    """Write JSON as an answer that ends its connection."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return head + b"content-length: %d\r\n\r\n%s" % (len(content), content)
