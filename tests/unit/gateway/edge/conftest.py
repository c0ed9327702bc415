"""A Redis server for limits that gateways share, and the way to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.edge.stock import Command, Reply
from kvstore.errors import TierUnavailable
from kvstore.tiers.redis_server.link import RedisLink
from tests.redis_server import client, server  # noqa: F401


def asks(url: str) -> Callable[[Sequence[Command]], Sequence[Reply]]:
    link = RedisLink(url, 2.0)

    def ask(commands: Sequence[Command]) -> Sequence[Reply]:
        try:
            return link.run(commands)
        except TierUnavailable as error:
            raise ConnectionError(str(error)) from None

    return ask
