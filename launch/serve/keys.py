"""The API keys of a server: gathered at its start, and again at SIGHUP."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gateway.config import GatewayConfig
from gateway.context import Gateway
from gateway.keys import BadKeyLine, read_key_lines
from gateway.limits.key_limits import usual_limits
from launch.errors import LaunchError, UsageError
from launch.settings.effective_settings import EffectiveSettings

log = logging.getLogger("thermocline.launch")


def key_lines(config: GatewayConfig) -> list[str]:
    """Return the lines of the settings and of the file that they name.

    Raises:
        UsageError: the file cannot be read.
    """
    lines = list(config.api_keys)
    if file := config.api_keys_file:
        try:
            lines += read_key_lines(file)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the API keys {file} cannot be read: {error}") from error
    return lines


def reload_keys(gateway: Gateway, reread: Callable[[], EffectiveSettings]) -> None:
    """Take keys and limits as they are now; where anything is wrong, all stay as they were.

    A key that is gone opens nothing from the next request on; answers that run go on.
    """
    try:
        config = reread().settings.gateway
        gateway.tenants.replace(key_lines(config))
    except (LaunchError, BadKeyLine) as error:
        log.error("API keys and limits stay as they were: %s", error)
        return
    gateway.limits.usual = usual_limits(config)
    log.info("API keys and limits were read again: %d keys", gateway.tenants.num_keys)
