"""The other engines on a store's Redis, as far as it knows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from kvstore.config import StoreConfig
from kvstore.members.facts import Facts
from kvstore.session import MissReason
from kvstore.stats import Members
from kvstore.tiers.seal import read_secret


class Company(Protocol):
    """Reports to a store about the engines that share its Redis.

    Thread-safe; never waits.
    """

    def report(self) -> Members | None:
        """Report the other engines; None: they are not known."""

    def why_unknown(self) -> MissReason:
        """Return why a session that is not known here may be missing."""

    def why_diverged(self) -> MissReason:
        """Return why a session that is known here may have nothing in common with its prompt."""

    def close(self) -> None: ...


class Alone:
    """Implements ``Company`` for a store without Redis."""

    def report(self) -> Members | None:
        return None

    def why_unknown(self) -> MissReason:
        return "never-stored"

    def why_diverged(self) -> MissReason:
        return "diverged"

    def close(self) -> None:
        pass


ALONE: Final = Alone()


def joined(config: StoreConfig, facts: Callable[[], Facts]) -> Company:
    """Join the engines on the store's Redis, if it has one.

    Args:
        facts: returns this engine's present facts; called on a separate thread.

    Raises:
        ValueError: ``redis_url`` is not a URL of a Redis server, or the secret cannot be read.
    """
    if not (config.redis_url and config.redis_bytes):
        return ALONE
    from kvstore.members.membership import Membership  # redis-py is an extra
    from kvstore.tiers.redis_server.link import RedisLink

    secret = read_secret(Path(config.secret_file)) if config.secret_file else b""
    return Membership(RedisLink(config.redis_url, config.redis_deadline_s), secret, facts)
