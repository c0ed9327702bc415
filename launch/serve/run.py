"""Runs the server that ``build`` made until a signal, and applies changed settings at SIGHUP.

Changed settings are validated first: if one is wrong, none is applied.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from engines.base import Engine
from gateway.config import GatewayConfig
from gateway.gateway import Gateway
from gateway.keys import BadKeyLine
from gateway.server import DrainingServer, server_of
from gateway.watch.telemetry import configure_logging, keep_lines
from launch.calibrate.program import ProfileWatch
from launch.errors import LaunchError
from launch.machine.folders import announced, require_closed_folder
from launch.machine.installation import require_own_packages
from launch.machine.resources import raise_open_files
from launch.serve.build import BuiltServer, build
from launch.serve.preflight import listen, sole_server, take_path, take_port, url_of
from launch.settings.budgets import DERIVED
from launch.settings.effective_settings import EffectiveSettings, replica_settings
from launch.settings.schema import Settings, flat, masked
from launch.settings.units import show_bytes
from scheduler.sessions import RELOADABLE as OF_SCHEDULER

log = logging.getLogger("thermocline.launch")

LOOK_EVERY_S = 0.1
QUESTION = {"role": "user", "content": "What is the capital of France?"}

OF_GATEWAY = (
    *("api_keys", "api_keys_file", "admin_keys", "admin_keys_file", "model_aliases"),
    "key_limits",
)
_OF_ENTRY = ("aliases", "unload_after_s")
_TAKEN = {f"gateway.{x}" for x in OF_GATEWAY} | {f"scheduler.{x}" for x in OF_SCHEDULER}


def serve(
    effective: EffectiveSettings,
    environ: Mapping[str, str],
    reread: Callable[[], EffectiveSettings] | None = None,
) -> int:
    """Serve until a signal; return the exit code, which is 1 if the server ended without one.

    Args:
        reread: called at SIGHUP, reads all sources of settings again; None = they never change.

    Raises:
        UsageError, LaunchError: the server cannot be started; the message gives the remedy.
    """
    configure_logging(effective.settings.log_level, effective.settings.log_format)
    require_own_packages()
    config = effective.settings.gateway
    engines = [x.effective for x in effective.each]
    kinds = [x.engine_kind for x in engines]
    raise_open_files("mlx" if "mlx" in kinds else kinds[0])
    with ExitStack() as stack:
        sock = stack.enter_context(take_port(config))
        sockets = [sock, *_admin_sockets(stack, config)]
        if effective.engines:  # several engines share this folder; a single one locks it below
            stack.enter_context(sole_server(effective.folders.data))
        for each in (x for y in engines for x in replica_settings(y).values()):
            if each.is_ours and each.settings.store.disk_bytes:
                disk = each.settings.store.disk_path or each.folders.data
                stack.enter_context(sole_server(Path(disk).expanduser()))
        built = stack.enter_context(build(effective, environ))
        keep_lines(built.app.state.gateway.log_ring)
        for each_socket in sockets:
            listen(each_socket, config)
        server = server_of(built.app, config)
        url = url_of(sock)
        stack.enter_context(announced(effective.folders.data, url))
        _log_settings(effective, built, url)
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            watches = [ProfileWatch(x.effective, x.engine) for x in built.engines]
            reload = Reload(built.app.state.gateway, effective, reread or (lambda: effective))
            runner.run(_run(server, sockets, built, url, watches, reload))
    log.info("stopped")
    return 0 if server.started and not built.gave_up else 1


def _admin_sockets(stack: ExitStack, config: GatewayConfig) -> list[socket.socket]:
    """Return the bound sockets for admins that the settings name: a port, a unix socket."""
    sockets = []
    if config.admin_port:
        own = msgspec.structs.replace(config, host=config.admin_host, port=config.admin_port)
        sockets.append(stack.enter_context(take_port(own)))
        log.info("admins: %s", url_of(sockets[-1]))
    if config.admin_socket:
        require_closed_folder(config.admin_socket, "gateway.admin_socket")
        sockets.append(stack.enter_context(take_path(config.admin_socket)))
        log.info("admins: unix:%s", config.admin_socket)
    return sockets


async def _run(
    server: DrainingServer,
    sockets: list[socket.socket],
    built: BuiltServer,
    url: str,
    watches: Sequence[ProfileWatch],
    reload: Callable[[], None],
) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    tasks = [
        asyncio.create_task(_wait_for(built, server, url), name="wait-for-engine"),
        *(asyncio.create_task(x.run(), name="profile-watch") for x in watches),
    ]
    try:
        await server.serve(sockets=sockets)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # all that they started has ended, too


async def _wait_for(built: BuiltServer, server: DrainingServer, url: str) -> None:
    """Wait until each model is loaded; stop the server if all engines have given up."""
    gateway: Gateway = built.app.state.gateway
    always = [x for x in gateway.models if x.on_demand is None]
    await asyncio.gather(*(_wait_for_one(x.engine, built, server) for x in always))
    if server.should_exit:
        return
    model = gateway.models.default
    for other in gateway.models:
        if other.on_demand is not None:
            log.info("model %s is loaded when a request asks for it", other.name)
    log.info("try: %s", example(model.label, url, needs_key=not built.tenants.open_to_all))
    log.info("look: %s/ui", url)


async def _wait_for_one(engine: Engine, built: BuiltServer, server: DrainingServer) -> None:
    began, said = time.monotonic(), ""
    while (welcome := engine.welcome) is None:
        if engine.gave_up:
            server.should_exit = server.should_exit or built.gave_up
            return
        if (trouble := engine.trouble) != said:
            said = trouble
            log.info("waiting: %s", trouble)
        await asyncio.sleep(LOOK_EVERY_S)
    log.info(
        "ready after %.1f s: %s by %s (%s), context %d, codec %s",
        time.monotonic() - began,
        welcome.model,
        welcome.engine,
        welcome.engine_version,
        welcome.max_context,
        welcome.codec.name,
    )
    if not welcome.hibernation:
        log.warning("sessions will not hibernate: %s", welcome.hibernation_reason)


def example(model: str, url: str, *, needs_key: bool) -> str:
    """Return a shell command that takes a turn with curl."""
    key = ["-H", "authorization: Bearer KEY"] if needs_key else []
    body = json.dumps({"model": model, "messages": [QUESTION]})
    return shlex.join(
        ["curl", f"{url}/v1/chat/completions", "-H", "content-type: application/json", *key]
        + ["-d", body]
    )


def _log_settings(effective: EffectiveSettings, built: BuiltServer, url: str) -> None:
    settings = effective.settings
    names = [x.model_name for x in built.engines]
    what = f"model {names[0]} is being loaded" if len(names) == 1 else f"models {', '.join(names)}"
    log.info("listening on %s; %s", url, what)
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
    if (blas := next((x.blas for x in built.engines if x.blas is not None), None)) is not None:
        log.log(logging.INFO if blas.fast else logging.WARNING, "%s", blas.message)


class Reload:
    """Applies changed settings to a running server. Called on the event loop."""

    def __init__(
        self, gateway: Gateway, settings: EffectiveSettings, reread: Callable[[], EffectiveSettings]
    ) -> None:
        """``settings``: the settings with which the server was started."""
        self._gateway = gateway
        self._before = flat(settings.settings)
        self._reread = reread

    def __call__(self) -> None:
        """Read the settings again, and apply keys, limits, aliases and idle times.

        If they cannot be read, nothing changes. A removed key is refused from the next request on;
        running answers go on. Other changes are logged: they need a restart.
        """
        gateway = self._gateway
        try:
            effective = self._reread()
            settings = effective.settings
            gateway.keys.reconfigure(settings.gateway)
        except (LaunchError, BadKeyLine, OSError, UnicodeDecodeError) as error:
            log.error("the settings stay as they were: %s", error)
            return
        taken = {name: getattr(settings.gateway, name) for name in OF_GATEWAY}
        gateway.config = msgspec.structs.replace(gateway.config, **taken)
        gateway.limits.usual = settings.gateway.usual_limits
        for model in gateway.models:
            model.sessions.reconfigure(settings.scheduler)
        self._take_entries(settings)
        self._log_changes(flat(settings), effective.resolved.origin)

    def _take_entries(self, settings: Settings) -> None:
        """Apply the models' aliases and unload times; log the changes that need a restart."""
        before: dict[str, Any] = {x["name"]: x for x in self._before["engines"]}
        now: dict[str, Any] = {x["name"]: x for x in flat(settings)["engines"]}
        if list(now) != list(before):
            log.warning("engines: models were added, removed or moved; restart to apply that")
        models = {x.given_name: x for x in self._gateway.models}
        for name in now.keys() & before.keys() & models.keys():
            changed = [x for x, value in now[name].items() if value != before[name].get(x)]
            models[name].aliases = tuple(now[name]["aliases"])
            if (on_demand := models[name].on_demand) is not None:
                on_demand.unload_after_s = now[name]["unload_after_s"]
            for field in changed:
                if field in _OF_ENTRY:
                    log.info("engines, %s: %s is %s now", name, field, now[name][field])
                    before[name][field] = now[name][field]
                else:
                    log.warning("engines, %s: %s changed; restart to apply it", name, field)

    def _log_changes(self, now: dict[str, Any], origin: Callable[[str], str]) -> None:
        for name, value in now.items():
            # Budgets that follow from the free space differ each time they are computed.
            is_other = name == "engines" or origin(name).startswith(DERIVED)
            before = self._before.get(name)
            if is_other or value == before:
                continue
            if name in _TAKEN:
                log.info("%s: %s -> %s", name, masked(name, before), masked(name, value))
                self._before[name] = value
            else:
                log.warning("%s changed; restart to apply it", name)
        tenants = self._gateway.tenants
        log.info(
            "settings were read again: %d keys, %d of them admins'",
            tenants.num_keys + tenants.num_admin_keys,
            tenants.num_admin_keys,
        )
