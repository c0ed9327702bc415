"""How a Redis server bounds its memory, and the trouble if it does not.

The tier has no budget of its own: several engines share a server, and only the server knows what
all of them hold there. Every blob has a time to live, so all policies that evict suit, the
``volatile`` ones too. INFO is asked instead of CONFIG, which managed servers refuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.tiers.redis_server.client import RedisCluster

ADVICE = "set maxmemory, and maxmemory-policy allkeys-lru"


class ServerBounds(NamedTuple):
    """The memory of one server, or of all primaries of a cluster, with all that others keep there.

    ``max_bytes``: 0 = it has no bound; None = unknown, as all is if it refuses INFO.
    """

    used_bytes: int = 0
    max_bytes: int | None = None
    policies: tuple[str, ...] = ()
    num_keys: int = 0
    evictions: int = 0

    @property
    def trouble(self) -> str:
        """The reason why the server may hold too much, or refuse to store; "" = it evicts."""
        if self.max_bytes is None:
            return "it does not say whether its memory is bounded"
        if not self.max_bytes:
            return f"it has no maxmemory: only the time to live bounds what it holds; {ADVICE}"
        if "noeviction" in self.policies:
            return f"it evicts nothing: once it is full, it stores no more sessions; {ADVICE}"
        return ""


def read_bounds(client: Any) -> ServerBounds:
    """Ask redis-py's client of a server or cluster. Raises ``redis.RedisError`` or ``OSError``."""
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
