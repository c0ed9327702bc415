"""The gateway's addresses: bound before the server is built, opened to clients once it is built."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from gateway.config import GatewayConfig
from launch.errors import LaunchError

BACKLOG = 2048


def take_port(config: GatewayConfig) -> socket.socket:
    """A socket bound to the gateway's address, taken before the server is built.

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


@contextmanager
def take_path(path: str) -> Iterator[socket.socket]:
    """A unix socket bound to ``path``, which only this user may open (0600); removed at the end.

    Raises:
        LaunchError: another server has it, or something else is there, or it cannot be made.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(f"{path}.lock"))
            sock = stack.enter_context(_bound(path))
        except OSError as error:
            reason = error.strerror or str(error)
            raise LaunchError(f"cannot make the socket {path}: {reason}") from error
        yield sock


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock that says whose socket it is, also before it listens and while it drains.

    The file stays: were it removed, two servers could each lock one of that name.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from error
        yield
    finally:
        os.close(lock)


@contextmanager
def _bound(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        # Its server has died: it holds no lock, and another program's would answer.
        if Path(path).is_socket() and not _is_served(path):
            Path(path).unlink()
        mask = os.umask(0o177)  # from the first moment: a chmod would come late
        try:
            sock.bind(path)
        finally:
            os.umask(mask)
        own = _file_id(path)
        try:
            yield sock
        finally:
            with suppress(OSError):
                if _file_id(path) == own:  # else another process has put another one there
                    Path(path).unlink()


def _file_id(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            return False
    return True


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
