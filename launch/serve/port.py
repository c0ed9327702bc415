"""The gateway's address: taken before the slow things start, opened to clients after them."""

from __future__ import annotations

import socket

from gateway.config import GatewayConfig
from launch.errors import LaunchError

BACKLOG = 2048


def take_port(config: GatewayConfig) -> socket.socket:
    """A socket bound to the gateway's address, taken before the slow things start.

    It refuses connections until ``listen``, so that no client hangs while a start takes its time.

    Raises:
        LaunchError: the port is taken, or the address is not one of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise _cannot_listen(config, error) from error
    return sock


def listen(sock: socket.socket, config: GatewayConfig) -> None:
    """Accept connections from now on. Raises ``LaunchError`` if another server was faster."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(config, error) from error


def _cannot_listen(config: GatewayConfig, error: OSError) -> LaunchError:
    return LaunchError(
        f"cannot listen on {config.host} port {config.port}: {error.strerror};"
        " choose another with --port or --host"
    )


def url_of(sock: socket.socket) -> str:
    """The URL under which this machine reaches the socket."""
    host, port = sock.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
