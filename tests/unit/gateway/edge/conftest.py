"""A Redis server for what gateways count together."""

from __future__ import annotations

from tests.redis_server import client, server  # noqa: F401
