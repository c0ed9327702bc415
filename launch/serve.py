"""Runs what ``build`` has put together, until a signal."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import socket
import time
from collections.abc import Mapping

from engines.wire import Welcome
from gateway.config import GatewayConfig
from gateway.server import DrainingServer, server_of
from launch.build import Served, build
from launch.effective import Effective
from launch.errors import LaunchError
from launch.first_calibration import FirstCalibration
from launch.logs import configure_logging
from launch.settings import masked
from launch.units import show_bytes

log = logging.getLogger("thermocline.launch")

BACKLOG = 2048
LOOK_EVERY_S = 0.1
QUESTION = {"role": "user", "content": "What is the capital of France?"}


def serve(effective: Effective, environ: Mapping[str, str]) -> int:
    """Blocks; the exit code: 1 if it was no signal that ended it.

    Raises:
        UsageError, LaunchError: it cannot be started; says what to do.
    """
    configure_logging(effective.settings.log_level)
    config = effective.settings.gateway
    with take_port(config) as sock, build(effective, environ) as served:
        listen(sock, config)
        server = server_of(served.app, config)
        url = _url(sock)
        _say_settings(effective, served, url)
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            calibration = FirstCalibration(effective, served.engine, environ)
            runner.run(_run(server, sock, served, url, calibration))
    log.info("stopped")
    return 0 if server.started and not served.engine.gave_up else 1


def take_port(config: GatewayConfig) -> socket.socket:
    """A socket with the address, taken before the slow things start. It refuses connections until
    ``listen``: nobody is to hang while a start waits for something.

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
    """Raises ``LaunchError``: another server took the same port and was faster."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(config, error) from error


def _cannot_listen(config: GatewayConfig, error: OSError) -> LaunchError:
    return LaunchError(
        f"cannot listen on {config.host} port {config.port}: {error.strerror};"
        " choose another with --port or --host"
    )


async def _run(
    server: DrainingServer,
    sock: socket.socket,
    served: Served,
    url: str,
    calibration: FirstCalibration,
) -> None:
    tasks = [
        asyncio.create_task(_wait_for(served, server, url), name="wait-for-engine"),
        asyncio.create_task(calibration.run(), name="calibration"),
    ]
    try:
        await server.serve(sockets=[sock])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # what they started has ended then


async def _wait_for(served: Served, server: DrainingServer, url: str) -> None:
    """Until the first turn can be taken, or it is certain that none ever can."""
    engine = served.engine
    began, said = time.monotonic(), ""
    while (welcome := engine.welcome) is None:
        if engine.gave_up:
            server.should_exit = True
            return
        if (trouble := engine.trouble) != said:
            said = trouble
            log.info("waiting: %s", trouble)
        await asyncio.sleep(LOOK_EVERY_S)
    _announce(welcome, time.monotonic() - began)
    log.info("try: %s", example(welcome.model, url, needs_key=served.needs_key))


def _announce(welcome: Welcome, took_s: float) -> None:
    log.info(
        "ready after %.1f s: %s by %s (%s), context %d, codec %s",
        took_s,
        welcome.model,
        welcome.engine,
        welcome.engine_version,
        welcome.max_context,
        welcome.codec.name,
    )
    if not welcome.hibernation:
        log.warning("sessions will not hibernate: %s", welcome.hibernation_reason)


def example(model: str, url: str, *, needs_key: bool) -> str:
    """A command line that takes a turn, to be pasted into a shell."""
    key = ["-H", "authorization: Bearer KEY"] if needs_key else []
    body = json.dumps({"model": model, "messages": [QUESTION]})
    return shlex.join(
        ["curl", f"{url}/v1/chat/completions", "-H", "content-type: application/json", *key]
        + ["-d", body]
    )


def _say_settings(effective: Effective, served: Served, url: str) -> None:
    settings = effective.settings
    log.info("listening on %s; model %s is being loaded", url, served.model_name)
    log.info(
        "budgets: hot %s, ram %s, disk %s%s; codec %s",
        show_bytes(settings.engine.hot_bytes),
        show_bytes(settings.store.ram_bytes),
        show_bytes(settings.store.disk_bytes),
        f", redis {masked('', settings.store.redis_url)}" if settings.store.redis_url else "",
        settings.store.codec,
    )
    if served.blas is not None:
        log.log(logging.INFO if served.blas.fast else logging.WARNING, "%s", served.blas.message)


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
