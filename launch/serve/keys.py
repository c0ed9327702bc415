"""The API keys of a server: gathered at its start, and again at SIGHUP."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gateway.config import GatewayConfig
from gateway.keys import BadKeyLine, Tenants, read_key_lines
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


def reload_keys(tenants: Tenants, reread: Callable[[], EffectiveSettings]) -> None:
    """Take the keys as they are now; where anything is wrong, the ones before stay, all of them.

    A key that is gone opens nothing from the next request on; answers that run go on.
    """
    try:
        tenants.replace(key_lines(reread().settings.gateway))
    except (LaunchError, BadKeyLine) as error:
        log.error("the API keys stay as they were: %s", error)
        return
    log.info("the API keys were read again: %d", tenants.num_keys)
