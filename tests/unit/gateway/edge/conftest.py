"""A Redis server for limits that gateways share."""

from __future__ import annotations

from tests.redis_server import client, server  # noqa: F401
