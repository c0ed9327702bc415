"""Takes ports and the disk folder for this server, and checks memory and the cold store's tiers.

All of this is done before the engine is started, so that a wrong setting ends the command with one
sentence. A tier that fails later is only a missing cache and ends nothing. A Redis that does not
answer does not end the start either, since it may come back.

The gateway's addresses are bound before the server is built, and opened to clients after that.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from engines.config import vllm_rank_folder
from gateway.config import GatewayConfig
from kvstore.codecs.presets import check_name
from kvstore.config import AUTO, StoreConfig
from kvstore.errors import TierInUse, TierUnavailable, UnknownCodec
from kvstore.tiers.disk_budget import capacity_within
from kvstore.tiers.disk_folder import DiskFolder
from launch.errors import LaunchError, UsageError
from launch.serve.sharing import redis_link
from launch.settings.units import show_bytes

log = logging.getLogger("thermocline.launch")

# An engine whose gateway was killed saves its sessions before it releases the folder.
IN_USE_WAIT_S = 30.0
LOOK_EVERY_S = 0.2
BACKLOG = 2048
SERVER_LOCK = "server.lock"  # contains the process id of the server that holds the lock


def check_tiers(
    config: StoreConfig, *, vllm_ranks: int = 0, in_use_wait_s: float = IN_USE_WAIT_S
) -> None:
    """Check that every tier can be opened. Waits while another process is leaving a disk folder.

    Args:
        vllm_ranks: workers of vLLM, which share the disk limit; 0 = the engine is not vLLM.

    Raises:
        UsageError: ``store.redis_url`` is not a URL of a Redis server, or ``store.disk_bytes``
            is too small for a tier.
        LaunchError: the disk folder cannot be used, or redis-py is not installed.
    """
    if config.disk_bytes:
        try:
            capacity_within(config.disk_bytes // max(1, vllm_ranks))
        except TierUnavailable as error:
            raise UsageError(f"store.{error} (--disk)") from error
        root = Path(config.disk_path)
        # Each process with a disk tier has its own folder.
        for owner in [vllm_rank_folder(root, rank) for rank in range(vllm_ranks)] or [root]:
            _check_disk(owner / "cold", in_use_wait_s)
    if config.redis_url:
        _check_redis(config)


@contextmanager
def sole_server(folder: Path) -> Iterator[None]:
    """Lock the folder of the disk tier for this server inside the ``with`` block.

    The engine has a lock, too, but that cannot distinguish a second server from the engine of an
    earlier one that is still ending.

    Raises:
        LaunchError: a running server has locked the folder; the message has its process id.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / SERVER_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:  # ``check_tiers`` reports the trouble with the folder
        yield
        return
    with os.fdopen(lock, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LaunchError(
                f"{folder} belongs to a server that runs (process {file.read(20).strip()}); stop"
                " it, or give this one a folder of its own with --data-dir FOLDER"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def check_memory(
    *, weights: int | None, hot_bytes: int, ram_bytes: int, free_bytes: int, available: int | None
) -> None:
    """Check that the machine's memory holds the weights and the budgets.

    Otherwise a machine whose GPU shares its memory would hang: see ``scheduler.headroom``.

    Args:
        weights: bytes of the weights; None if the model is not here yet.
        free_bytes: bytes that have to stay free; 0 = nothing is checked.
        available: bytes that are available now; None = unknown, so nothing is checked.

    Raises:
        LaunchError: they do not fit; the message has the numbers.
    """
    if not free_bytes:
        return
    if available is None:
        log.warning("memory is not watched: this system does not report how much is free")
        return
    wanted = (weights or 0) + hot_bytes + ram_bytes + free_bytes
    if wanted > available:
        parts = f"{show_bytes(hot_bytes)} hot, {show_bytes(ram_bytes)} cold in RAM"
        if weights is not None:
            parts = f"{show_bytes(weights)} of weights, {parts}"
        raise LaunchError(
            f"{show_bytes(available)} of memory are available, and {show_bytes(wanted)} are needed:"
            f" {parts}, {show_bytes(free_bytes)} to stay free; lower --hot or --ram, end other"
            " programs, or take a smaller model"
        )


def _check_disk(folder: Path, wait_s: float) -> None:
    end = time.monotonic() + wait_s
    waiting = False
    while True:
        try:
            DiskFolder(folder).release(clean=False)
            return
        except TierUnavailable as error:
            if not isinstance(error, TierInUse) or time.monotonic() >= end:
                raise LaunchError(f"{error} (--data-dir FOLDER, or --disk 0)") from error
        if not waiting:
            log.warning("waiting up to %.0f s until another process leaves %s", wait_s, folder)
            waiting = True
        time.sleep(LOOK_EVERY_S)


def _check_redis(config: StoreConfig) -> None:
    link = redis_link(config, config.redis_deadline_s)
    try:
        link.run([("PING",)])
    except TierUnavailable:  # the link has logged why
        log.warning("continuing without Redis until it answers")
    finally:
        link.close()


def check_codecs(store: StoreConfig) -> None:
    """Check the codec's name. Raises ``UsageError`` if it is unknown.

    The engine decides whether the codec may serve this model.
    """
    try:
        if store.codec != AUTO:
            check_name(store.codec)
    except UnknownCodec as error:
        raise UsageError(f"store.codec: {error}") from error


def take_port(config: GatewayConfig) -> socket.socket:
    """Return a socket bound to the gateway's address.

    It refuses connections until ``listen``, so that no client waits for a slow start.

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
    """Bind a unix socket to ``path`` that only this user may open (0600); remove it at the end.

    Raises:
        LaunchError: another server has the socket, the path is taken, or binding fails.
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
    """Hold the lock of a socket's owner, from before it listens until it has drained.

    The file is not removed: otherwise two servers could each lock a file of this name.
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
        # A socket that does not answer was left by a server that died: we hold its lock.
        if Path(path).is_socket() and not _is_served(path):
            Path(path).unlink()
        mask = os.umask(0o177)  # chmod after bind would leave a moment in which others can connect
        try:
            sock.bind(path)
        finally:
            os.umask(mask)
        own = _file_id(path)
        try:
            yield sock
        finally:
            with suppress(OSError):
                if _file_id(path) == own:  # otherwise another process has replaced the file
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
    """Begin to accept connections. Raises ``LaunchError`` if another server took the port."""
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
    """Return the URL under which this machine reaches the socket."""
    host, port = sock.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
