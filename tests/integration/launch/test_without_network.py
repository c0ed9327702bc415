"""A server with the real engine asks no other host: it runs without a network, and does not try.

The kernel counts each packet, and each look-up of a name, that has no way out of a namespace.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import aiohttp
import pytest

from tests.integration.launch.test_serve import Server
from tests.integration.tiny_models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.mlx]

WITHOUT = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
TRY = ["python3", "-c", "import socket; socket.create_connection(('192.0.2.1', 80), 1)"]
SHOW = ["sh", "-c", '"$@"; cat /proc/self/net/snmp', "sh"]


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skip where none can be made, or where a try is not counted."""
    try:
        done = subprocess.run([*WITHOUT, *SHOW, *TRY], capture_output=True, text=True)
    except OSError:
        pytest.skip("no unshare here")
    if not done.stdout or num_tries(done.stdout) != 1:
        pytest.skip("no namespace without a network can be made here")


def num_tries(counters: str) -> int:
    names, values = (x.split() for x in counters.splitlines() if x.startswith("Ip:"))
    return int(dict(zip(names[1:], values[1:], strict=True))["OutNoRoutes"])


async def completed(socket: Path) -> int:
    """Have a turn computed, over the admins' socket: files are the same in all namespaces."""
    body = {"model": "tiny", "prompt": "hello there", "max_tokens": 4, "session_id": "s"}
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as http,
        http.post("http://localhost/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return int((await answer.json())["usage"]["completion_tokens"])


def test_the_real_engine_serves_without_a_network_and_tries_to_reach_no_host(tmp_path, monkeypatch):
    socket, model = tmp_path / "admin.sock", tmp_path / "tiny"
    model.mkdir()
    write_model("llama", model)
    monkeypatch.setenv("THERMOCLINE_GATEWAY__ADMIN_SOCKET", str(socket))
    server = Server(tmp_path, "--model", str(model), engine="mlx", within=WITHOUT)
    try:
        for _ in range(2):
            assert asyncio.run(completed(socket)) >= 1
        counters = Path(f"/proc/{server.process.pid}/net/snmp").read_text()
        assert num_tries(counters) == 0
    finally:
        assert server.stop() == 0
