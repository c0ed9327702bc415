"""The primaries that a Redis URL names: one server, the master that Sentinels name, or a cluster's.

    redis://[user:password@]host[:port][/db]      rediss:// with TLS, unix:// for a socket
    redis+sentinel://[user:password@]host[:port],host[:port],.../service[/db]
    rediss+sentinel://...                         TLS to the master; none to the Sentinels

User and password are those of the master. Sentinels that require their own get
``?sentinel_username=...&sentinel_password=...``; redis-py reads all other fields of the query.

    redis+cluster://[user:password@]host[:port],host[:port],...      rediss+cluster:// with TLS

The nodes in the URL are asked for the others. What a cluster says of its slots holds until a node
refuses a key (MOVED) or does not answer; the next batch then asks again.

Source: the Redis Cluster specification, key distribution model and CLUSTER SLOTS.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
from redis.connection import parse_url
from redis.crc import key_slot
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedSSLConnection

SENTINEL: Final = "+sentinel"
SENTINEL_PORT: Final = 26379
WITHOUT_WAIT: Final = 64  # connections of a pool without waiting: more than there are threads
OWN: Final = "sentinel_"  # prefix of the query's fields that are for Sentinels
_TIMEOUTS: Final = ("socket_timeout", "socket_connect_timeout")
Address: TypeAlias = tuple[str, int]
CLUSTER: Final = "+cluster"
NUM_SLOTS: Final = 16384
_PORT: Final = 6379
_MAX_NODES: Final = 1000  # more are not believed


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
    known = _options_of(scheme, login + at, db, query)
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


def _options_of(scheme: str, login: str, db: str, query: str) -> dict[str, Any]:
    """Parse a URL as if there were one server, whose address is then left out."""
    one = urlunsplit((scheme, f"{login}host", db, query, ""))
    known: dict[str, Any] = parse_url(one)  # type: ignore[no-untyped-call]
    known.pop("host")
    return known


def address(text: str, port: int) -> tuple[str, int]:
    """Read ``host[:port]``; ``port`` is taken where there is none. Raises ``ValueError``."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a host is missing")
    return parts.hostname, parts.port or port


class _Range(NamedTuple):
    first: int
    last: int
    node: Address


class SlotMap:
    """Maps slots to nodes, as it was at one moment."""

    def __init__(self, ranges: Sequence[_Range], pools: Mapping[Address, Any]) -> None:
        self._ranges = ranges
        self._pools = pools

    @property
    def pools(self) -> list[Any]:
        """The pools of connections to all nodes that have slots."""
        return [self._pools[x] for x in dict.fromkeys(x.node for x in self._ranges)]

    def pool_of(self, key: bytes) -> Any:
        """Return the pool of the node that has ``key``.

        Raises:
            redis.ConnectionError: no node has its slot.
        """
        slot = key_slot(key)
        index = bisect_right(self._ranges, slot, key=lambda x: x.first) - 1
        if index < 0 or slot > self._ranges[index].last:
            raise redis.ConnectionError("no node of the cluster has the slot of a key")
        return self._pools[self._ranges[index].node]


class Cluster:
    """Knows the nodes of a cluster, and keeps connections to them. Thread-safe.

    Args:
        options: of each connection, as redis-py names them.

    Raises:
        ValueError: not a URL. The message may repeat its password.
    """

    def __init__(self, url: str, **options: Any) -> None:
        parts = urlsplit(url)
        login, at, hosts = parts.netloc.rpartition("@")
        seeds = [address(x, _PORT) for x in hosts.split(",")]
        if parts.path.strip("/") not in ("", "0"):
            raise ValueError("a cluster has one database, 0")
        scheme = parts.scheme.removesuffix(CLUSTER)
        self._options = {**options, **_options_of(scheme, login + at, "", parts.query)}
        self._lock = threading.Lock()  # the fields below; not held while a node is asked
        self._pools: dict[Address, Any] = {}
        for node in seeds:
            self.pool_at(node)
        self._asked_first = seeds[0]
        self._slots: SlotMap | None = None

    def slots(self, check_time: Callable[[], None]) -> SlotMap:
        """Return what is known of the slots; asks the nodes, one after another, if nothing is.

        Raises:
            redis.RedisError: no node answers.
            OSError: no node answers.
        """
        with self._lock:
            if self._slots is not None:
                return self._slots
            nodes = [self._asked_first, *(x for x in self._pools if x != self._asked_first)]
            self._asked_first = nodes[1 % len(nodes)]  # if this one does not answer
        last: Exception = redis.ConnectionError("no node of the cluster knows its slots")
        for node in nodes:
            check_time()
            try:
                ranges = _ranges(_ask(self.pool_at(node)), node)
            except (redis.RedisError, OSError) as error:
                last = error
                continue
            except (ValueError, TypeError, IndexError):  # of something else than a cluster
                continue
            if ranges:
                slots = SlotMap(ranges, {x.node: self.pool_at(x.node) for x in ranges})
                with self._lock:
                    self._slots, self._asked_first = slots, node
                return slots
        raise last

    def forget(self) -> None:
        """Have the nodes asked for their slots before the next use."""
        with self._lock:
            self._slots = None

    def pool_at(self, node: Address) -> Any:
        """Return the pool of connections to a node.

        Raises:
            redis.ConnectionError: there are too many nodes.
        """
        with self._lock:
            if node not in self._pools:
                if len(self._pools) == _MAX_NODES:
                    raise redis.ConnectionError("the cluster has too many nodes")
                self._pools[node] = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
                    host=node[0], port=node[1], **self._options
                )
            return self._pools[node]

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.disconnect()


def _ask(pool: Any) -> Any:
    connection = pool.get_connection()
    whole = False
    try:
        connection.send_command("CLUSTER", "SLOTS")
        reply = connection.read_response()
        whole = True
        return reply
    finally:
        if not whole:
            with suppress(OSError):
                connection.disconnect()
        pool.release(connection)


def _ranges(reply: Sequence[Any], asked: Address) -> list[_Range]:
    """Read the reply to CLUSTER SLOTS: lists of first slot, last slot, primary, replicas."""
    found = []
    for first, last, (host, port, *_), *_ in reply:
        if 0 <= first <= last < NUM_SLOTS:
            name = (host or b"").decode()  # a node without a name is reached as the asked one was
            found.append(_Range(first, last, (name or asked[0], int(port))))
    return sorted(found)
