"""Entries on a Redis or Valkey server: the place that several gateways share.

All keys of a tenant have one hash tag, so they lie in one slot of a cluster, and each change is one
transaction. An entry expires by itself, and the server may evict it at any time; what its lists
still say of it then is passed over.

    thermocline:stored:{tenant}:entry:KIND:ID    body, session and time of an entry
                               :items:KIND:ID    its items by id
                               :order:KIND:ID    their ids in order
                               :list:KIND        ids of all entries in order
                               :used             "KIND:ID" by the time of last use
                               :session:ID       "KIND:ID" of a session's entries in order
                               :owner:ITEM       the entry that has an item, the latest if several
                               :sizes, :total    bytes of each entry by "KIND:ID", and of all
                               :seq              the last number in a list
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gateway.stored.shelf import Entry, Item, Kind, Limits, Page, Query, StoreFailed

try:
    import redis
except ImportError as error:
    raise ImportError("redis_url needs redis-py: pip install 'thermocline[redis]'") from error

_ROW_BYTES = 200  # what an entry or item takes besides its body, about
_BATCH = 100


class RedisShelf:
    """Implements ``shelf.Shelf`` on the server at ``url``, which is connected to at the first use.

    Args:
        deadline_s: for one exchange with the server.
        clock: gives seconds since 1970; gateways that share a server need about the same time.
    """

    def __init__(
        self,
        url: str,
        limits: Limits,
        deadline_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._redis: Any = redis.Redis.from_url(
            url, socket_timeout=deadline_s, socket_connect_timeout=deadline_s
        )

    def put(self, tenant: str, entry: Entry, items: Sequence[Item] = ()) -> bool:
        nbytes = sum(len(x) + _ROW_BYTES for x in (entry.body, *(i.body for i in items)))
        if nbytes > self._limits.tenant_bytes:
            return False
        keys, now = _Keys(tenant), self._clock()
        with self._exchange() as server:
            self._delete(server, keys, entry.kind, entry.id)
            name = f"{entry.kind}:{entry.id}"
            number = server.incr(keys.seq)
            with server.pipeline(transaction=True) as change:
                row = {"body": entry.body, "session": entry.session, "created": now}
                change.hset(keys.entry(name), mapping=row)
                change.zadd(keys.list(entry.kind), {entry.id: number})
                change.zadd(keys.used, {name: now})
                change.zadd(keys.session(entry.session), {name: number})
                change.hset(keys.sizes, name, nbytes)
                change.incrby(keys.total, nbytes)
                self._add_items(change, keys, name, items, 0)
                self._keep(change, keys, name, entry.session)
                change.execute()
            self._trim(server, keys, now)
        return True

    def get(self, tenant: str, kind: Kind, id: str) -> Entry | None:
        keys, name = _Keys(tenant), f"{kind}:{id}"
        with self._exchange() as server:
            row = server.hgetall(keys.entry(name))
            if b"body" not in row:
                return None
            session = row[b"session"].decode()
            with server.pipeline(transaction=True) as change:
                change.zadd(keys.used, {name: self._clock()}, xx=True)
                self._keep(change, keys, name, session)
                change.execute()
        return Entry(kind, id, session, row[b"body"], float(row[b"created"]))

    def change(self, tenant: str, kind: Kind, id: str, body: bytes) -> bool:
        keys, name = _Keys(tenant), f"{kind}:{id}"
        with self._exchange() as server:
            old = server.hget(keys.entry(name), "body")
            if old is None:
                return False
            self._grow(server, keys, name, len(body) - len(old), {"body": body})
            return True

    def delete(self, tenant: str, kind: Kind, id: str) -> bool:
        with self._exchange() as server:
            return self._delete(server, _Keys(tenant), kind, id)

    def entries(
        self, tenant: str, kind: Kind, query: Query, wanted: Callable[[bytes], bool]
    ) -> Page:
        keys = _Keys(tenant)
        with self._exchange() as server:
            ids = _behind(server, keys.list(kind), query)
            rows: list[Item] = []
            for first in range(0, len(ids), _BATCH):
                batch = ids[first : first + _BATCH]
                with server.pipeline(transaction=False) as asked:
                    for id in batch:
                        asked.hget(keys.entry(f"{kind}:{id}"), "body")
                    bodies = asked.execute()
                for id, body in zip(batch, bodies, strict=True):
                    if body is None or not wanted(body):
                        continue
                    if query.limit is not None and len(rows) >= query.limit:
                        return Page(rows, True)
                    rows.append(Item(id, body))
        return Page(rows, False)

    def append(self, tenant: str, kind: Kind, id: str, items: Sequence[Item]) -> bool:
        keys, name = _Keys(tenant), f"{kind}:{id}"
        with self._exchange() as server:
            session = server.hget(keys.entry(name), "session")
            if session is None:
                return False
            known = server.hmget(keys.items(name), [x.id for x in items]) if items else []
            fresh = [x for x, old in zip(items, known, strict=True) if old is None]
            nbytes = sum(len(x.body) + _ROW_BYTES for x in fresh)
            last = server.zrevrange(keys.order(name), 0, 0, withscores=True)
            with server.pipeline(transaction=True) as change:
                change.hincrby(keys.sizes, name, nbytes)
                change.incrby(keys.total, nbytes)
                change.zadd(keys.used, {name: self._clock()})
                self._add_items(change, keys, name, fresh, int(last[0][1]) + 1 if last else 0)
                self._keep(change, keys, name, session.decode())
                change.execute()
            self._trim(server, keys, self._clock())
            return bool(server.exists(keys.entry(name)))

    def items(self, tenant: str, kind: Kind, id: str, query: Query) -> Page | None:
        keys, name = _Keys(tenant), f"{kind}:{id}"
        with self._exchange() as server:
            if not server.exists(keys.entry(name)):
                return None
            ids = _behind(server, keys.order(name), query)
            shown = ids if query.limit is None else ids[: query.limit]
            bodies = server.hmget(keys.items(name), shown) if shown else []
        rows = [Item(x, body) for x, body in zip(shown, bodies, strict=True) if body is not None]
        return Page(rows, len(shown) < len(ids))

    def delete_item(self, tenant: str, kind: Kind, id: str, item: str) -> bool:
        keys, name = _Keys(tenant), f"{kind}:{id}"
        with self._exchange() as server:
            if not server.exists(keys.entry(name)):
                return False
            body = server.hget(keys.items(name), item)
            if body is not None:
                nbytes = len(body) + _ROW_BYTES
                with server.pipeline(transaction=True) as change:
                    change.hdel(keys.items(name), item)
                    change.zrem(keys.order(name), item)
                    change.hincrby(keys.sizes, name, -nbytes)
                    change.decrby(keys.total, nbytes)
                    change.execute()
            return True

    def find_item(self, tenant: str, item: str, owner: str | None = None) -> bytes | None:
        keys = _Keys(tenant)
        with self._exchange() as server:
            if owner is None:
                found = server.get(keys.owner(item))
                names = [found.decode()] if found else []
            else:
                names = [f"{kind}:{owner}" for kind in ("response", "conversation", "completion")]
            for name in names:
                body: bytes | None = server.hget(keys.items(name), item)
                if body is not None:
                    return body
        return None

    def latest(self, tenant: str, kind: Kind, session: str) -> str | None:
        with self._exchange() as server:
            names = server.zrevrange(_Keys(tenant).session(session), 0, -1)
        found = (_split(x.decode()) for x in names)
        return next((id for of, id in found if of == kind), None)

    def forget(self, tenant: str, session: str) -> int:
        keys = _Keys(tenant)
        with self._exchange() as server:
            names = [x.decode() for x in server.zrange(keys.session(session), 0, -1)]
            return sum(self._delete(server, keys, *_split(name)) for name in names)

    def close(self) -> None:
        self._redis.close()

    @contextmanager
    def _exchange(self) -> Iterator[Any]:
        try:
            yield self._redis
        except (redis.RedisError, OSError) as error:  # its words may hold the server's address
            raise StoreFailed(f"redis does not answer ({type(error).__name__})") from None

    def _add_items(
        self, change: Any, keys: _Keys, name: str, items: Sequence[Item], first: int
    ) -> None:
        if not items:
            return
        change.hset(keys.items(name), mapping={x.id: x.body for x in items})
        change.zadd(keys.order(name), {x.id: first + i for i, x in enumerate(items)})
        for item in items:
            change.set(keys.owner(item.id), name, px=self._life_ms)

    def _keep(self, change: Any, keys: _Keys, name: str, session: str) -> None:
        """Give an entry its whole life again."""
        for key in (keys.entry(name), keys.items(name), keys.order(name), keys.session(session)):
            change.pexpire(key, self._life_ms)

    @property
    def _life_ms(self) -> int:
        return int(self._limits.max_age_s * 1000)

    def _grow(
        self, server: Any, keys: _Keys, name: str, nbytes: int, row: dict[str, bytes]
    ) -> None:
        with server.pipeline(transaction=True) as change:
            change.hset(keys.entry(name), mapping=row)
            change.hincrby(keys.sizes, name, nbytes)
            change.incrby(keys.total, nbytes)
            change.execute()

    def _delete(self, server: Any, keys: _Keys, kind: str, id: str) -> bool:
        """Remove an entry, and what is said of it; returns False if it was not there."""
        name = f"{kind}:{id}"
        session = server.hget(keys.entry(name), "session")
        nbytes = server.hget(keys.sizes, name)  # outlives the entry, which may have expired
        items = server.hkeys(keys.items(name))
        with server.pipeline(transaction=True) as change:
            change.delete(keys.entry(name), keys.items(name), keys.order(name))
            change.zrem(keys.list(kind), id)
            change.zrem(keys.used, name)
            change.hdel(keys.sizes, name)
            if session is not None:
                change.zrem(keys.session(session.decode()), name)
            for item in items:
                change.delete(keys.owner(item.decode()))
            if nbytes is not None:
                change.decrby(keys.total, int(nbytes))
            change.execute()
        return session is not None

    def _trim(self, server: Any, keys: _Keys, now: float) -> None:
        """Remove a tenant's entries that are too old, or over the budget."""
        old = server.zrangebyscore(keys.used, "-inf", f"({now - self._limits.max_age_s}")
        for name in old:
            self._delete(server, keys, *_split(name.decode()))
        while int(server.get(keys.total) or 0) > self._limits.tenant_bytes:
            (name, *_) = server.zrange(keys.used, 0, 0) or (None,)
            if name is None:  # the server evicted what this was counted by
                server.set(keys.total, 0)
                return
            self._delete(server, keys, *_split(name.decode()))


class _Keys:
    """The names of one tenant's keys."""

    def __init__(self, tenant: str) -> None:
        self._prefix = f"thermocline:stored:{{{tenant}}}"
        self.used = f"{self._prefix}:used"
        self.total = f"{self._prefix}:total"
        self.sizes = f"{self._prefix}:sizes"
        self.seq = f"{self._prefix}:seq"

    def entry(self, name: str) -> str:
        return f"{self._prefix}:entry:{name}"

    def items(self, name: str) -> str:
        return f"{self._prefix}:items:{name}"

    def order(self, name: str) -> str:
        return f"{self._prefix}:order:{name}"

    def list(self, kind: str) -> str:
        return f"{self._prefix}:list:{kind}"

    def session(self, session: str) -> str:
        return f"{self._prefix}:session:{session}"

    def owner(self, item: str) -> str:
        return f"{self._prefix}:owner:{item}"


def _split(name: str) -> tuple[str, str]:
    kind, _, id = name.partition(":")
    return kind, id


def _behind(server: Any, key: str, query: Query) -> list[str]:
    """List the ids of an order behind ``query.after``, all of them."""
    ids = [x.decode() for x in server.zrange(key, 0, -1, desc=not query.ascending)]
    if query.after is None:
        return ids
    return ids[ids.index(query.after) + 1 :] if query.after in ids else []
