"""What a server says never reaches the terminal as something that it obeys."""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import launch

EVIL = "m\x1b]0;owned\x07\x9b2J\x85\rx"
SESSION = {"id": EVIL, "model": EVIL, "state": EVIL, "tier": EVIL, "tokens": 1, "bytes": 1} | {
    "idle_s": 1.0,
    "pinned": False,
}
# A session that another server on the same Redis had last: less is known of it.
ELSEWHERE = {x: SESSION[x] for x in SESSION if x != "pinned"} | {"elsewhere": True}
ANSWERS: dict[str, tuple[int, Any]] = {
    "/v1/models": (200, {"data": [{"id": EVIL, "max_model_len": 9}]}),
    "/v1/sessions": (200, {"data": [SESSION, {**SESSION, "model": "m"}, ELSEWHERE]}),
    "/admin/keys": (
        200,
        {"data": [{"id": EVIL, "tenant": EVIL, "admin": True, "kept_in": EVIL, "limits": None}]},
    ),
}


class Hostile(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        failed = {"error": {"message": EVIL, "code": EVIL}}
        status, body = ANSWERS.get(self.path.partition("?")[0], (400, failed))
        written = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Hostile)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    "arguments",
    [
        ["connect", "aider"],
        ["connect", "aider", "--write"],
        ["connect", "qwen-code", "--write"],
        ["connect", "claude", "--model", "other"],
        ["sessions", "list"],
        ["sessions", "list", "--json"],
        ["sessions", "show", "s"],
        ["keys", "list"],
    ],
)
def test_no_control_character_of_a_server_is_printed(url, arguments, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = run(*arguments, "--url", url)
    assert [x for x in out + err if not x.isprintable() and x != "\n"] == []
    if arguments[0] == "connect":
        assert code != 0 and not list(tmp_path.rglob("*.yml")) and not list(tmp_path.rglob("*.env"))
    if "--json" in arguments:
        assert json.loads(out)[0]["id"] == EVIL


def test_commands_print_by_say() -> None:
    """``print`` and ``typer.echo`` would pass on what a terminal obeys."""
    for path in (Path(launch.__file__).parent / "cli").rglob("*.py"):
        calls = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Call)]
        names = {ast.unparse(x.func) for x in calls}
        assert names.isdisjoint({"print", "typer.echo", "sys.stdout.write"}), path
