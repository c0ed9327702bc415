"""The configurations of load balancers that ship with us, with the real programs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.stacks.product_stack import free_port
from tests.asking import asked
from tests.integration.launch.test_serve import Server
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

FOLDER = Path(__file__).parents[3] / "launch" / "balancers"
PROGRAMS = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf"}


@pytest.fixture(params=sorted(PROGRAMS))
def balanced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, list[Server]]]:
    """The address of a balancer, and the two servers that it sends requests to."""
    program = shutil.which(request.param) or shutil.which(request.param, path="/usr/sbin")
    if program is None:
        pytest.skip(f"no {request.param} here; on Debian: apt-get install {request.param}")
    servers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        servers.append(Server(tmp_path / name))
    text = (FOLDER / PROGRAMS[request.param]).read_text()
    for old, server in [("8081", servers[0]), ("8082", servers[1])]:
        assert f"127.0.0.1:{old}" in text
        text = text.replace(f"127.0.0.1:{old}", server.url.removeprefix("http://"))
    text = text.replace("maxconn 4096", "maxconn 100")  # needs few open files
    text = text.replace("fall 2", "fall 60")  # a busy machine answers no check in time
    text = text.replace("/tmp/thermocline-nginx.pid", str(tmp_path / "nginx.pid"))
    try:
        with balancer(program, text, tmp_path) as address:
            yield f"http://{address}", servers
    finally:
        for server in servers:
            server.stop()


@contextmanager
def balancer(program: str, text: str, folder: Path) -> Iterator[str]:
    """Run the program with this configuration; its address, once it listens there."""
    port, config = free_port(), folder / "balancer.conf"
    assert "127.0.0.1:8000" in text
    config.write_text(text.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    options = ["-f", str(config)]
    if program.endswith("nginx"):
        options = ["-c", str(config), "-p", str(folder), "-g", "daemon off;"]
    with subprocess.Popen([program, *options]) as process:
        try:
            until(lambda: listens(process, port), 30)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def listens(process: subprocess.Popen[bytes], port: int) -> bool:
    assert process.poll() is None, "it has ended"
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def chat(url: str, session: str) -> int:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
    try:
        return asked(f"{url}/v1/chat/completions", body, session=session, timeout_s=30).status
    except OSError:
        return 0


def sessions(server: Server) -> set[str]:
    return {x["id"] for x in asked(f"{server.url}/v1/sessions").content["data"]}


def test_sessions_stay_on_their_server_and_move_when_it_is_gone(balanced):
    url, servers = balanced
    end = time.monotonic() + 120
    while (status := chat(url, "first")) != 200:  # until its checks have found the servers
        ready = [asked(f"{x.url}/readyz").status for x in servers]
        assert time.monotonic() < end, (status, ready)
        time.sleep(0.2)
    names = [f"s{i}" for i in range(20)]
    for _ in range(2):
        assert {chat(url, name) for name in names} == {200}
    had = [sessions(x) - {"first"} for x in servers]
    assert all(had) and had[0] | had[1] == set(names)
    assert not had[0] & had[1]  # no session changed its server

    servers[0].kill()
    until(lambda: all(chat(url, name) == 200 for name in sorted(had[0])[:3]), every_s=0.2)
    assert {chat(url, name) for name in names} == {200}
    assert sessions(servers[1]) >= set(names)
