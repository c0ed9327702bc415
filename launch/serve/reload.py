"""Takes over changed settings while the server runs, at SIGHUP: validated first, all or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.config import GatewayConfig
from gateway.context import Gateway
from gateway.keys import BadKeyLine
from gateway.limits.key_limits import usual_limits
from launch.errors import LaunchError
from launch.settings.default_budgets import DERIVED
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.schema import Settings, flat, masked
from scheduler.sessions import RELOADABLE as OF_SCHEDULER

log = logging.getLogger("thermocline.launch")

OF_GATEWAY = (
    *("api_keys", "api_keys_file", "admin_keys", "admin_keys_file", "model_aliases"),
    *("requests_per_minute", "tokens_per_minute", "concurrent_requests", "sessions_per_tenant"),
    *("tenant_ram_bytes", "tenant_disk_bytes", "tenant_redis_bytes"),
)
_OF_ENTRY = ("aliases", "unload_after_s")
_TAKEN = {f"gateway.{x}" for x in OF_GATEWAY} | {f"scheduler.{x}" for x in OF_SCHEDULER}


class Reload:
    """Reads the settings again for a running server. Called on the event loop."""

    def __init__(
        self, gateway: Gateway, settings: EffectiveSettings, reread: Callable[[], EffectiveSettings]
    ) -> None:
        """``settings``: those that the server was started with."""
        self._gateway = gateway
        self._before = flat(settings.settings)
        self._reread = reread

    def __call__(self) -> None:
        """Take keys, limits, aliases and idle times as they are now; else all stay as they were.

        A key that is gone opens nothing from the next request on; answers that run go on.
        """
        gateway = self._gateway
        try:
            effective = self._reread()
            settings = effective.settings
            gateway.keys.reconfigure(settings.gateway)
        except (LaunchError, BadKeyLine, OSError, UnicodeDecodeError) as error:
            log.error("the settings stay as they were: %s", error)
            return
        gateway.config = _with(gateway.config, settings.gateway)
        gateway.limits.usual = usual_limits(settings.gateway)
        for model in gateway.models:
            model.sessions.reconfigure(settings.scheduler)
        self._take_entries(settings)
        self._say(flat(settings), effective.resolved.origin)

    def _take_entries(self, settings: Settings) -> None:
        """Take over the aliases of models, and when they are unloaded; say what stays."""
        before: dict[str, Any] = {x["name"]: x for x in self._before["engines"]}
        now: dict[str, Any] = {x["name"]: x for x in flat(settings)["engines"]}
        if list(now) != list(before):
            log.warning("engines: models came, went or changed places; that needs a new start")
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
                    log.warning("engines, %s: %s changed; that needs a new start", name, field)

    def _say(self, now: dict[str, Any], origin: Callable[[str], str]) -> None:
        # Budgets that were derived from the free space change with every look.
        derived = {x for x in now if origin(x).startswith(DERIVED)} | {"engines"}
        changed = [x for x in now if x not in derived and now[x] != self._before.get(x)]
        for name in changed:
            if name in _TAKEN:
                before, after = masked(name, self._before.get(name)), masked(name, now[name])
                log.info("%s: %s -> %s", name, before, after)
                self._before[name] = now[name]
            else:
                log.warning("%s changed; that needs a new start", name)
        tenants = self._gateway.tenants
        log.info(
            "settings were read again: %d keys, %d of them admins'",
            tenants.num_keys + tenants.num_admin_keys,
            tenants.num_admin_keys,
        )


def _with(config: GatewayConfig, now: GatewayConfig) -> GatewayConfig:
    return msgspec.structs.replace(config, **{name: getattr(now, name) for name in OF_GATEWAY})
