"""Connections to the Redis of a URL: one server, or the master that Sentinels name.

    redis://[user:password@]host[:port][/db]      rediss:// with TLS, unix:// for a socket
    redis+sentinel://[user:password@]host[:port],host[:port],.../service[/db]
    rediss+sentinel://...                         TLS to the master; none to the Sentinels

User and password are those of the master. Sentinels that require their own get
``?sentinel_username=...&sentinel_password=...``; redis-py reads all other fields of the query.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
from redis.connection import parse_url
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedSSLConnection

SENTINEL: Final = "+sentinel"
SENTINEL_PORT: Final = 26379
WITHOUT_WAIT: Final = 64  # connections of a pool without waiting: more than there are threads
OWN: Final = "sentinel_"  # prefix of the query's fields that are for Sentinels


def open_pool(url: str, **options: Any) -> Any:
    """Make a pool of connections; nothing is connected before the first use.

    Args:
        options: of each connection, as redis-py names them, and ``max_connections`` and
            ``timeout``: seconds to wait for a free one. To a master that Sentinels name, more
            connections are allowed, and no call waits.

    Returns redis-py's pool.

    Raises ``ValueError``: not a URL. The message may repeat its password.
    """
    if urlsplit(url).scheme.endswith(SENTINEL):
        return _sentinel_pool(url, **options)
    return redis.BlockingConnectionPool.from_url(url, **options)


def _sentinel_pool(url: str, *, timeout: float, **options: Any) -> Any:
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError(f"name the service after the Sentinels, as in {parts.scheme}://HOST/NAME")
    sentinels = [address(x, SENTINEL_PORT) for x in hosts.split(",")]
    fields = parse_qsl(parts.query)
    own = {k.removeprefix(OWN): v for k, v in fields if k.startswith(OWN)}
    query = urlencode([(k, v) for k, v in fields if not k.startswith(OWN)])
    scheme = parts.scheme.removesuffix(SENTINEL)
    # Parsed as if there were one server, whose address is then left out.
    one = urlunsplit((scheme, f"{login}{at}master", db, query, ""))
    known = parse_url(one)  # type: ignore[no-untyped-call]
    known.pop("host")
    if known.pop("connection_class", None) is not None:
        known["connection_class"] = SentinelManagedSSLConnection
    # All Sentinels may have to be asked within the time of one server.
    limits = {x: y / len(sentinels) for x, y in options.items() if x in _TIMEOUTS}
    manager = Sentinel(  # type: ignore[no-untyped-call]
        sentinels, sentinel_kwargs={**limits, **own}
    )
    options["max_connections"] = max(options["max_connections"], WITHOUT_WAIT)
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        service, manager, **{**options, **known}
    )


_TIMEOUTS: Final = ("socket_timeout", "socket_connect_timeout")


def address(text: str, port: int) -> tuple[str, int]:
    """Read ``host[:port]``; ``port`` is taken where there is none. Raises ``ValueError``."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a host is missing")
    return parts.hostname, parts.port or port
