"""The admins' unix socket of a server that needs keys: a client that may open it is an admin."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from typer.testing import CliRunner

from gateway.edge.connections import most_connections
from gateway.keys import generate_key
from launch.cli.main import app
from launch.errors import LaunchError
from tests.integration.launch.test_serve import Server

pytestmark = pytest.mark.slow
FEW_FILES = 256  # the fewest with which a server starts


async def asked_on(path: Path, target: str, body: Any = None) -> tuple[int, bytes]:
    """Ask on the socket, as a client with an unknown key."""
    headers = {"authorization": "Bearer nonsense"}
    method = "GET" if body is None else "POST"
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http,
        http.request(method, f"http://localhost{target}", json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.read()


def test_only_clients_of_the_socket_are_admins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, keys, (key, line) = tmp_path / "admin.sock", tmp_path / "keys", generate_key("alice")
    keys.write_text(line + "\n")
    monkeypatch.setenv("THERMOCLINE_GATEWAY__ADMIN_SOCKET", str(path))
    server = Server(tmp_path, "--api-keys", str(keys))

    def run(*arguments: str, url: str = f"unix:{path}", api_key: str = "") -> Any:
        asked = ["keys", *arguments, "--url", url, "--api-key", api_key]
        return CliRunner().invoke(app, asked)

    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        made = run("new", "carol")
        assert made.exit_code == 0, made.output
        assert "carol" in run("list").output and "carol:" in keys.read_text()
        for api_key in ("", key):
            assert run("list", url=server.url, api_key=api_key).exit_code == 1
        status, snapshot = asyncio.run(asked_on(path, "/v1/snapshot"))
        assert status == 200 and b'"admin":true' in snapshot
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
        assert asyncio.run(asked_on(path, "/v1/chat/completions", body))[0] == 200
    finally:
        assert server.stop() == 0
    assert not path.exists()


def test_a_start_is_refused_where_others_could_take_the_sockets_place(tmp_path, monkeypatch):
    path = tmp_path / "shared" / "admin.sock"
    path.parent.mkdir()
    path.parent.chmod(0o777)
    monkeypatch.setenv("THERMOCLINE_GATEWAY__ADMIN_SOCKET", str(path))
    started = CliRunner().invoke(app, ["serve", "--engine", "fake", "--port", "0"])
    assert isinstance(started.exception, LaunchError)
    assert f"other users can write {path.parent} " in str(started.exception)
    assert not path.exists()


def test_who_opens_the_socket_gets_into_a_server_that_is_full(tmp_path, monkeypatch):
    path = tmp_path / "admin.sock"
    monkeypatch.setenv("THERMOCLINE_GATEWAY__ADMIN_SOCKET", str(path))
    server = Server(tmp_path, within=["prlimit", f"--nofile={FEW_FILES}"])
    try:
        asked_for: dict[str, object] = {
            "model": "fake",
            "messages": [{"role": "user", "content": "go on"}],
            "stream": True,
            "metadata": {"fake": "chunks=2000 delay_s=0.05"},
        }
        body = json.dumps(asked_for).encode()
        place = urlsplit(server.url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {place.netloc}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        with ExitStack() as served:
            for _ in range(most_connections(FEW_FILES, wanted=0)):
                one = socket.create_connection((place.hostname, place.port), 30)
                served.enter_context(one).sendall(head.encode() + body)
            assert one.recv(1)  # the last of them is being served, too
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{server.url}/livez", timeout=30)
            assert asyncio.run(asked_on(path, "/livez"))[0] == 200
    finally:
        assert server.stop() == 0
