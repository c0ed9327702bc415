"""Runs the server that ``build`` has wired, until a signal."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from engines.wire import Welcome
from gateway.config import GatewayConfig
from gateway.server import DrainingServer, server_of
from launch.calibrate.profile_watch import ProfileWatch
from launch.machine.installation import require_own_packages
from launch.machine.open_files import raise_open_files
from launch.serve.build import BuiltServer, build
from launch.serve.logs import configure_logging, keep_lines
from launch.serve.port import listen, take_path, take_port, url_of
from launch.serve.preflight import sole_server
from launch.serve.reload import Reload
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.schema import masked
from launch.settings.units import show_bytes

log = logging.getLogger("thermocline.launch")

LOOK_EVERY_S = 0.1
QUESTION = {"role": "user", "content": "What is the capital of France?"}


def serve(
    effective: EffectiveSettings,
    environ: Mapping[str, str],
    reread: Callable[[], EffectiveSettings] | None = None,
) -> int:
    """Serve until a signal; returns the exit code, which is 1 if anything else ended it.

    Args:
        reread: the settings as their sources say now, for SIGHUP; None = as they are.

    Raises:
        UsageError, LaunchError: it cannot be started; says what to do.
    """
    configure_logging(effective.settings.log_level, effective.settings.log_format)
    require_own_packages()
    config = effective.settings.gateway
    raise_open_files(effective.engine_kind)
    with ExitStack() as stack:
        sock = stack.enter_context(take_port(config))
        sockets = [sock, *_admin_sockets(stack, config)]
        if effective.engine_kind in ("mlx", "vllm") and effective.settings.store.disk_bytes:
            disk = effective.settings.store.disk_path or effective.folders.data
            stack.enter_context(sole_server(Path(disk).expanduser()))
        built = stack.enter_context(build(effective, environ))
        keep_lines(built.app.state.gateway.log_ring)
        for each in sockets:
            listen(each, config)
        server = server_of(built.app, config)
        url = url_of(sock)
        _say_settings(effective, built, url)
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            watch = ProfileWatch(effective, built.engine)
            reload = Reload(built.app.state.gateway, effective, reread or (lambda: effective))
            runner.run(_run(server, sockets, built, url, watch, reload))
    log.info("stopped")
    return 0 if server.started and not built.engine.gave_up else 1


def _admin_sockets(stack: ExitStack, config: GatewayConfig) -> list[socket.socket]:
    """The admins' own port and their unix socket, if they have any."""
    sockets = []
    if config.admin_port:
        own = msgspec.structs.replace(config, host=config.admin_host, port=config.admin_port)
        sockets.append(stack.enter_context(take_port(own)))
        log.info("admins: %s", url_of(sockets[-1]))
    if config.admin_socket:
        sockets.append(stack.enter_context(take_path(config.admin_socket)))
        log.info("admins: unix:%s", config.admin_socket)
    return sockets


async def _run(
    server: DrainingServer,
    sockets: list[socket.socket],
    built: BuiltServer,
    url: str,
    watch: ProfileWatch,
    reload: Callable[[], None],
) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    tasks = [
        asyncio.create_task(_wait_for(built, server, url), name="wait-for-engine"),
        asyncio.create_task(watch.run(), name="profile-watch"),
    ]
    try:
        await server.serve(sockets=sockets)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # what they started has ended then


async def _wait_for(built: BuiltServer, server: DrainingServer, url: str) -> None:
    """Wait until the first turn can be taken; stop the server if it is certain that none can."""
    engine = built.engine
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
    log.info("try: %s", example(welcome.model, url, needs_key=not built.tenants.open_to_all))
    log.info("look: %s/ui", url)


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


def _say_settings(effective: EffectiveSettings, built: BuiltServer, url: str) -> None:
    settings = effective.settings
    log.info("listening on %s; model %s is being loaded", url, built.model_name)
    log.info(
        "budgets: hot %s, ram %s, disk %s%s; codec %s",
        show_bytes(settings.engine.hot_bytes),
        show_bytes(settings.store.ram_bytes),
        show_bytes(settings.store.disk_bytes),
        f", redis {masked('', settings.store.redis_url)}" if settings.store.redis_url else "",
        settings.store.codec,
    )
    for line in effective.capacity:
        log.info("capacity: %s", line)
    if built.blas is not None:
        log.log(logging.INFO if built.blas.fast else logging.WARNING, "%s", built.blas.message)
