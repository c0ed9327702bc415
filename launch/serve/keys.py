"""The API keys of a server: gathered at its start."""

from __future__ import annotations

from gateway.access.key_list import KeyLines, lines_of
from gateway.config import GatewayConfig
from launch.errors import UsageError


def key_lines(config: GatewayConfig) -> KeyLines:
    """Return the lines of the settings and of the files that they name.

    Raises:
        UsageError: a file cannot be read.
    """
    try:
        return lines_of(config)
    except (OSError, UnicodeDecodeError) as error:
        files = " and ".join(x for x in (config.api_keys_file, config.admin_keys_file) if x)
        raise UsageError(f"the API keys {files} cannot be read: {error}") from error
