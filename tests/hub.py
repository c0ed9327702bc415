"""A hub of models on this machine, for the hub's own client: it has one small model."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

MODEL = "tiny/model-1"
COMMIT = "a" * 40
PIECE = 64 << 10
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"w" * (4 * PIECE),
    "README.md": b"not wanted",
}


class _Hub(BaseHTTPRequestHandler):
    wait_s = 0.0  # before each piece of a file
    claimed_bytes: int | None = None  # for the weights

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith(f"/api/models/{MODEL}/tree"):
            rows = [
                {"type": "file", "path": x, "size": len(y), "oid": hashlib.sha1(y).hexdigest()}
                for x, y in FILES.items()
            ]
            self._send(json.dumps(rows).encode(), with_body)
        elif path.startswith(f"/api/models/{MODEL}"):
            siblings = [
                {"rfilename": x, "size": len(y), "blobId": hashlib.sha1(y).hexdigest()}
                for x, y in FILES.items()
            ]
            siblings[1]["size"] = self.claimed_bytes or siblings[1]["size"]
            about = {"id": MODEL, "sha": COMMIT, "siblings": siblings}
            self._send(json.dumps(about).encode(), with_body)
        elif path.startswith(f"/{MODEL}/resolve") and name in FILES:
            self._send(FILES[name], with_body)
        else:
            self.send_error(404)

    def _send(self, body: bytes, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("x-repo-commit", COMMIT)
        self.end_headers()
        for at in range(0, len(body) if with_body else 0, PIECE):
            time.sleep(self.wait_s if len(body) > PIECE else 0)
            self.wfile.write(body[at : at + PIECE])

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub(
    cache: Path,
    environ: pytest.MonkeyPatch,
    wait_s: float = 0.0,
    claimed_bytes: int | None = None,
) -> Iterator[None]:
    """Serve the model while inside; the client finds the hub and its cache by the environment."""
    handler = type("Hub", (_Hub,), {"wait_s": wait_s, "claimed_bytes": claimed_bytes})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    environ.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    environ.setenv("HF_HUB_CACHE", str(cache))
    environ.setenv("HF_HUB_DISABLE_XET", "1")
    environ.delenv("HF_HUB_OFFLINE", raising=False)
    try:
        yield
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
