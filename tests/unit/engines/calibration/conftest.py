"""A Redis server for profiles that engines share."""

from __future__ import annotations

from tests.redis_server import client, server  # noqa: F401
