"""The port is taken early, and answers late."""

from __future__ import annotations

import socket

import pytest

from gateway.config import GatewayConfig
from launch.errors import LaunchError
from launch.serve.port import listen, take_port

CONFIG = GatewayConfig(port=0)


def test_nobody_hangs_on_a_port_that_does_not_serve_yet():
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
