"""A Redis server for stored objects."""

from __future__ import annotations

from tests.redis_server import server  # noqa: F401
