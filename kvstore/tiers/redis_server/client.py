"""Opens redis-py's client for a Redis URL, and reads how its server bounds its memory.

    redis://[user:password@]host[:port][/db]      rediss:// with TLS, unix:// for a socket
    redis+sentinel://[user:password@]host[:port],host[:port],.../service[/db]
    rediss+sentinel://...                         TLS to the master; none to the Sentinels
    redis+cluster://[user:password@]host[:port],host[:port],...      rediss+cluster:// with TLS

User and password are those of the master or the nodes. For Sentinels with their own, add
``?sentinel_username=...&sentinel_password=...``; redis-py reads all other fields of the query.
No command is ever retried: a miss costs a prefill, and a retry would cost the same time again.

The tier has no budget of its own, since only the server knows what all engines hold there. Every
blob has a time to live, so any policy that evicts will do. The policy is read with INFO, since
managed servers refuse CONFIG.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.cluster import ClusterNode
    from redis.cluster import RedisCluster as RedisCluster
    from redis.connection import parse_url
    from redis.exceptions import RedisClusterException
    from redis.retry import Retry
    from redis.sentinel import Sentinel
except ImportError as error:
    raise ImportError("redis_url needs redis-py: pip install 'thermocline[redis]'") from error

CLUSTER: Final = "+cluster"
OWN: Final = "sentinel_"  # prefix of the query's fields for the Sentinels' own user and password
ADVICE: Final = "set maxmemory, and maxmemory-policy allkeys-lru"
READ_BYTES: Final = 256 << 10
_SENTINEL_PORT: Final = 26379
_PORT: Final = 6379


class RedisServers:
    """redis-py's client of one server or of a cluster, connected at its first use. Thread-safe.

    All methods except ``forget`` and ``close`` raise ``redis.RedisError`` or ``OSError`` if no
    server answers.

    Args:
        timeout_s: the time for connecting, and for each wait for bytes.

    Raises:
        ValueError: ``url`` is not valid. The message may contain its password.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        options = {"protocol": 2, "socket_read_size": READ_BYTES, "retry": Retry(NoBackoff(), 0)}
        self._open = opener_of(url, limits | options, BLOCKING).open
        self.is_cluster = urlsplit(url).scheme.endswith(CLUSTER)
        self._opening = threading.Lock()
        self._client: Any = None if self.is_cluster else self._open()
        self._is_stale = False

    def client(self) -> Any:
        """Return redis-py's ``Redis``, or its ``RedisCluster`` with its slots read."""
        with self._opening:
            try:
                if self._client is None:
                    self._client = self._open()
                elif self._is_stale:
                    self._client.nodes_manager.initialize()
            except RedisClusterException as error:  # not a subclass of RedisError
                raise redis.ConnectionError(f"cluster: {error}") from None
            self._is_stale = False
            return self._client

    def node_of(self, key: bytes | str | None) -> Any:
        """Return the ``Redis`` client of the server that has a key; for None, of any server."""
        client = self.client()
        if not self.is_cluster:
            return client
        try:
            node = client.get_default_node() if key is None else client.get_node_from_key(key)
        except RedisClusterException as error:
            raise redis.ConnectionError(f"cluster: {error}") from None
        if node is None:
            raise redis.ConnectionError("no node of the cluster has the slot of a key")
        return client.get_redis_connection(node)

    def forget(self) -> None:
        """Read a cluster's slots again before the next use, since a node has failed."""
        self._is_stale = self.is_cluster

    def close(self) -> None:
        """Close all connections."""
        client = self._client
        if client is not None and self.is_cluster:
            client.close()
        elif client is not None:
            client.connection_pool.disconnect()


class Library(NamedTuple):
    """redis-py's classes, either those that block or those for asyncio."""

    redis: Any
    cluster: Any
    node: Any
    sentinel: Any


BLOCKING: Final = Library(redis.Redis, RedisCluster, ClusterNode, Sentinel)


class Opener(NamedTuple):
    """A function that opens the client of a URL; only a blocking cluster connects then.

    ``sentinels``: clients of the Sentinels, which the caller closes with the client.
    """

    open: Callable[[], Any]
    sentinels: Sequence[Any] = ()


def opener_of(url: str, options: Mapping[str, Any], library: Library) -> Opener:
    """Return the ``Opener`` of a URL, see the head of this module.

    Args:
        options: redis-py's options of each connection: time limits, retries.

    Raises:
        ValueError: ``url`` is not valid. The message may contain its password.
    """
    parts = urlsplit(url)
    kind = parts.scheme.partition("+")[2]
    if not kind:
        parse_url(url)  # type: ignore[no-untyped-call]
        return Opener(partial(library.redis.from_url, url, **options))
    login, at, hosts = parts.netloc.rpartition("@")
    path = parts.path.strip("/")
    if kind == "cluster":
        seeds = [library.node(*_address(x, _PORT)) for x in hosts.split(",")]
        if path not in ("", "0"):
            raise ValueError("a cluster has one database, 0")
        known, uses_tls = _options_of(parts, login + at, "", parts.query)
        known.pop("db", None)
        merged = {**options, **known, "ssl": uses_tls, "require_full_coverage": False}
        return Opener(lambda: library.cluster(startup_nodes=list(seeds), **merged))
    service, _, db = path.partition("/")
    if not service:
        raise ValueError(f"name the service after the Sentinels, as in {parts.scheme}://HOST/NAME")
    sentinels = [_address(x, _SENTINEL_PORT) for x in hosts.split(",")]
    fields = parse_qsl(parts.query)
    own = {k.removeprefix(OWN): v for k, v in fields if k.startswith(OWN)}
    query = urlencode([(k, v) for k, v in fields if not k.startswith(OWN)])
    known, uses_tls = _options_of(parts, login + at, db, query)
    # All Sentinels may have to be asked in turn, within the time limit of one server.
    share_s = options["socket_timeout"] / len(sentinels)
    limits = {"socket_timeout": share_s, "socket_connect_timeout": share_s}
    asked = {**limits, "retry": options["retry"], **own}
    named = library.sentinel(sentinels, sentinel_kwargs=asked)
    merged = {**options, **known}
    return Opener(partial(named.master_for, service, ssl=uses_tls, **merged), named.sentinels)


def _options_of(parts: SplitResult, login: str, db: str, query: str) -> tuple[dict[str, Any], bool]:
    """Return redis-py's options in a URL, without hosts, and whether it asks for TLS."""
    scheme = parts.scheme.partition("+")[0]
    one = urlunsplit((scheme, f"{login}host", db, query, ""))
    known: dict[str, Any] = parse_url(one)  # type: ignore[no-untyped-call]
    known.pop("host")
    return known, known.pop("connection_class", None) is not None


def _address(text: str, port: int) -> tuple[str, int]:
    """Parse ``host[:port]``; ``port`` is the default. Raises ``ValueError`` without a host."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a host is missing")
    return parts.hostname, parts.port or port


class ServerBounds(NamedTuple):
    """The memory of one server, or of all primaries of a cluster, with the data of all clients.

    ``max_bytes``: 0 = it has no bound; None = unknown, since it refuses INFO or leaves it out.
    """

    used_bytes: int = 0
    max_bytes: int | None = None
    policies: tuple[str, ...] = ()
    num_keys: int = 0
    evictions: int = 0

    @property
    def trouble(self) -> str:
        """The reason why the server may hold too much or refuse to store; "" = none."""
        if self.max_bytes is None:
            return "it does not say whether its memory is bounded"
        if not self.max_bytes:
            return f"it has no maxmemory: only the time to live bounds what it holds; {ADVICE}"
        if "noeviction" in self.policies:
            return f"it evicts nothing: once it is full, it stores no more sessions; {ADVICE}"
        return ""


def read_bounds(client: Any) -> ServerBounds:
    """Read the bounds of a server or cluster through redis-py's client.

    Raises:
        redis.RedisError, OSError: a server refused or did not answer.
    """
    is_cluster = isinstance(client, RedisCluster)
    found = client.info(target_nodes=client.PRIMARIES) if is_cluster else client.info()
    infos = [found] if "used_memory" in found or not is_cluster else list(found.values())
    limits = [x.get("maxmemory") for x in infos]
    policies = {str(x.get("maxmemory_policy", "")) for x in infos}
    is_known = all(isinstance(x, int) for x in limits) and "" not in policies
    databases = [db for x in infos for db in x.values() if isinstance(db, dict)]
    return ServerBounds(
        used_bytes=_sum(infos, "used_memory"),
        max_bytes=(_sum(infos, "maxmemory") if all(limits) else 0) if is_known else None,
        policies=tuple(sorted(policies)),
        num_keys=_sum(databases, "keys"),
        evictions=_sum(infos, "evicted_keys"),
    )


def _sum(infos: Sequence[Mapping[str, Any]], field: str) -> int:
    found = (x.get(field, 0) for x in infos)
    return sum(x for x in found if isinstance(x, int))
