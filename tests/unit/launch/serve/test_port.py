"""The port is taken early, and answers late."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from launch.errors import LaunchError
from launch.serve.port import listen, take_path, take_port

CONFIG = GatewayConfig(port=0)


def test_no_client_hangs_on_a_port_that_does_not_serve_yet():
    with take_port(CONFIG) as sock:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(sock.getsockname(), timeout=10)
        listen(sock, CONFIG)
        socket.create_connection(sock.getsockname(), timeout=10).close()


def test_of_two_servers_that_start_together_one_is_refused():
    with take_port(CONFIG) as first:
        config = GatewayConfig(port=first.getsockname()[1])
        with take_port(config) as second:
            listen(first, config)
            with pytest.raises(LaunchError, match="choose another with --port"):
                listen(second, config)


def test_a_unix_socket_is_this_users_own_and_gone_at_the_end(tmp_path: Path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a killed server leaves it
    with take_path(str(path)) as sock:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        listen(sock, CONFIG)
        with pytest.raises(LaunchError, match="in use"), take_path(str(path)):
            pass
    assert not path.exists()
    path.write_text("another program's file")
    with pytest.raises(LaunchError, match="in use"), take_path(str(path)):
        pass
    assert path.read_text()


def test_a_unix_socket_that_does_not_listen_yet_is_taken_all_the_same(tmp_path: Path):
    path = str(tmp_path / "s")
    with take_path(path):
        with pytest.raises(LaunchError, match="in use"), take_path(path):
            pass
        assert Path(path).is_socket()
    with take_path(path):
        pass


def test_a_server_leaves_a_unix_socket_that_another_has_put_in_place_of_its_own(tmp_path: Path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        with take_path(str(path)):
            path.unlink()
            other.bind(str(path))
        assert path.is_socket()
