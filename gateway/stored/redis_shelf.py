"""Entries on a Redis or Valkey server: the place that several gateways share.

All keys of a tenant have one hash tag, so they lie in one slot of a cluster, and each change is one
transaction. An entry expires by itself, and the server may evict it at any time; what its lists
still say of it then is passed over. What a deletion needs is done on a full server, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any, cast

from gateway.stored.redis_keys import OLDER, OWN, Keys, split, text
from gateway.stored.shelf import (
    KINDS,
    SLICE_ITEMS,
    Change,
    Found,
    Kind,
    Limits,
    Listed,
    Misshapen,
    Part,
    Row,
    Span,
    StoreFailed,
    slice_of,
)

try:
    import redis

    from kvstore.tiers.redis_server.client import RedisServers
except ImportError as error:
    raise ImportError("redis_url needs redis-py: pip install 'thermocline[redis]'") from error

_ROW_BYTES = 200  # what an entry or item takes besides its body, about


class RedisShelf:
    """Implements ``shelf.Shelf`` on a server or cluster, which is connected to at the first use.

    Args:
        deadline_s: for one exchange with the server.
        clock: gives seconds since 1970; gateways that share a server need about the same time.
    """

    place = "redis"

    def __init__(
        self,
        url: str,
        limits: Limits,
        deadline_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._older_are_gone = False
        self._servers = RedisServers(url, deadline_s)

    def find(
        self, tenant: str, kind: Kind, ids: Sequence[str], uses: Collection[str] = ()
    ) -> list[Found | None]:
        keys = Keys(tenant)
        with self._exchange(keys) as server, server.pipeline(transaction=False) as asked:
            for id in ids:
                asked.hmget(keys.entry(f"{kind}:{id}"), "head", "session")
                asked.hstrlen(keys.entry(f"{kind}:{id}"), "body")
            said = asked.execute()
        rows = zip(said[::2], said[1::2], strict=True)
        found = [Found(x, text(of), n) if x and of is not None else None for (x, of), n in rows]
        if used := {f"{kind}:{x}": f for x, f in zip(ids, found, strict=True) if f and x in uses}:
            with suppress(StoreFailed), self._exchange(keys) as server, server.pipeline() as change:
                for name, x in used.items():
                    self._keep(change, keys, name, x.session)
                change.zadd(keys.used, dict.fromkeys(used, self._clock()), xx=True)
                change.execute()
        return found

    def body(self, tenant: str, kind: Kind, id: str) -> bytes | None:
        keys = Keys(tenant)
        with self._exchange(keys) as server:
            return cast(bytes | None, server.hget(keys.entry(f"{kind}:{id}"), "body"))

    def parts(self, tenant: str, kind: Kind, id: str, span: Span) -> list[Part]:
        keys, name = Keys(tenant), f"{kind}:{id}"
        order, items, most = keys.order(name), keys.items(name), min(span.limit, SLICE_ITEMS)
        with self._exchange(keys) as server:
            first = span.skip
            if span.after is not None:
                rank = (server.zrank if span.ascending else server.zrevrank)(order, span.after)
                if rank is None:
                    return []
                first = rank + 1
            backward = not span.ascending
            ids = server.zrange(order, first, first + most - 1, desc=backward) if most > 0 else []
            with server.pipeline(transaction=False) as asked:
                for x in ids:
                    asked.hstrlen(items, x)
                wanted = slice_of(zip(ids, asked.execute(), strict=True))
            bodies = server.hmget(items, wanted) if wanted else []
        return [Part(text(x), body or b"") for x, body in zip(wanted, bodies, strict=True)]

    def part(self, tenant: str, kind: Kind, id: str, item: str) -> bytes | None:
        keys, name = Keys(tenant), f"{kind}:{id}"
        with self._exchange(keys) as server:
            return cast(bytes | None, server.hget(keys.items(name), item))

    def known(self, tenant: str, kind: Kind, id: str, items: Collection[str]) -> set[str]:
        keys = Keys(tenant)
        with self._exchange(keys) as server, server.pipeline(transaction=False) as asked:
            for x in items:
                asked.hexists(keys.items(f"{kind}:{id}"), x)
            return {x for x, is_there in zip(items, asked.execute(), strict=True) if is_there}

    def owner(self, tenant: str, item: str) -> tuple[Kind, str] | None:
        keys = Keys(tenant)
        with self._exchange(keys) as server:
            for name in server.zrevrange(keys.owner(item), 0, -1):
                server.pexpire(keys.owner(item), self._life_ms)
                kind, id = split(text(name))
                if kind in KINDS and server.exists(keys.entry(text(name))):
                    return kind, id
        return None

    def latest(self, tenant: str, kind: Kind, session: str) -> str | None:
        keys = Keys(tenant)
        with self._exchange(keys) as server:
            for name in map(text, server.zrevrange(keys.session(session), 0, SLICE_ITEMS - 1)):
                of, id = split(name)
                if of == kind and server.exists(keys.entry(name)):
                    return id
        return None

    def of_session(self, tenant: str, session: str) -> list[tuple[Kind, str]]:
        keys = Keys(tenant)
        with self._exchange(keys) as server:
            while names := server.zrange(keys.session(session), 0, SLICE_ITEMS - 1):
                with server.pipeline(transaction=False) as asked:
                    for name in map(text, names):
                        asked.exists(keys.entry(name))
                    there = [text(x) for x, is_ in zip(names, asked.execute(), strict=True) if is_]
                if there:
                    return [(cast(Kind, kind), id) for kind, id in map(split, there)]
                server.zrem(keys.session(session), *names)  # they have expired
        return []

    def number(self, tenant: str, kind: Kind, id: str) -> int | None:
        keys = Keys(tenant)
        with self._exchange(keys) as server:
            number = server.zscore(keys.list(kind, b""), id)
        return None if number is None else int(number)

    def listed(
        self, tenant: str, kind: Kind, tags: Sequence[bytes], beyond: int | None, ascending: bool
    ) -> Listed:
        keys = Keys(tenant)
        part = {"start": 0, "num": SLICE_ITEMS, "withscores": True}
        with self._exchange(keys) as server:
            if ascending:
                least = "-inf" if beyond is None else f"({beyond}"
                some = server.zrangebyscore(keys.list(kind, tags[0]), least, "+inf", **part)
            else:
                most = "+inf" if beyond is None else f"({beyond}"
                some = server.zrevrangebyscore(keys.list(kind, tags[0]), most, "-inf", **part)
            ids = [x for x, _ in some]
            for tag in tags[1:]:
                with server.pipeline(transaction=False) as asked:
                    for id in ids:
                        asked.zscore(keys.list(kind, tag), id)
                    scores = asked.execute()
                ids = [x for x, score in zip(ids, scores, strict=True) if score is not None]
        last = int(some[-1][1]) if len(some) == SLICE_ITEMS else None
        return Listed([text(x) for x in ids], last)

    def put(self, tenant: str, row: Row, parts: Sequence[Part]) -> bool:
        nbytes = sum(len(x) + _ROW_BYTES for x in (row.body, *(x.body for x in parts)))
        if nbytes > self._limits.tenant_bytes:
            return False
        keys, name = Keys(tenant), f"{row.kind}:{row.id}"
        with self._exchange(keys) as server:
            if not (server.get(keys.total) or b"0").removeprefix(b"-").isdigit():
                server.delete(keys.total)  # no number of ours: it is counted anew
            if server.hexists(keys.sizes, name):
                self._hide(server, keys, name)
                while not self._cleared(server, keys, name):
                    pass
            number = server.incr(keys.seq)
            with server.pipeline(transaction=True) as change:
                fields = {"head": row.head, "session": row.session, "number": number}
                change.hset(keys.entry(name), mapping={**fields, "body": row.body})
                self._tag(change, keys, name, row.tags, number)
                change.zadd(keys.used, {name: self._clock()})
                change.zadd(keys.session(row.session), {name: number})
                change.hset(keys.sizes, name, nbytes)
                change.incrby(keys.total, nbytes)
                self._add_items(change, keys, name, parts, 0, number)
                self._keep(change, keys, name, row.session)
                change.execute()
        return True

    def change(self, tenant: str, kind: Kind, id: str, change: Change) -> bool:
        keys, name = Keys(tenant), f"{kind}:{id}"
        entry, items, order = keys.entry(name), keys.items(name), keys.order(name)
        with self._exchange(keys) as server, server.pipeline(transaction=True) as made:
            made.watch(entry)
            head, session, number = made.hmget(entry, "head", "session", "number")
            if head is None or head != change.was:
                return False
            grown = sum(len(x.body) + _ROW_BYTES for x in change.added)
            if change.body is not None:
                grown += len(change.body) - made.hstrlen(entry, "body")
            if change.removed is not None:
                grown -= made.hstrlen(items, change.removed) + _ROW_BYTES
            last = made.zrevrange(order, 0, 0, withscores=True)
            number = int(number)
            old_tags = made.hget(keys.tags, name)
            made.multi()
            made.hset(entry, "head", change.head)
            if change.body is not None:
                made.hset(entry, "body", change.body)
            if change.tags is not None:
                self._untag(made, keys, name, old_tags)
                self._tag(made, keys, name, change.tags, number)
            if change.removed is not None:
                made.hdel(items, change.removed)
                made.zrem(order, change.removed)
                made.zrem(keys.owner(change.removed), name)
            first = int(last[0][1]) + 1 if last else 0
            self._add_items(made, keys, name, change.added, first, number)
            made.hincrby(keys.sizes, name, grown)
            made.incrby(keys.total, grown)
            made.zadd(keys.used, {name: self._clock()})
            self._keep(made, keys, name, text(session))
            try:
                made.execute()
            except redis.WatchError:
                return False
            return True

    def delete(self, tenant: str, kind: Kind, id: str) -> bool:
        keys, name = Keys(tenant), f"{kind}:{id}"
        with self._exchange(keys) as server:
            if there := bool(server.exists(keys.entry(name))):
                self._hide(server, keys, name)
        return there

    def tidy(self, tenant: str) -> bool:
        keys = Keys(tenant)
        try:
            with self._exchange(keys) as server:
                member = self._outlived(server, keys)
                if member is None:
                    return False
                name = text(member)
                if server.exists(keys.entry(name)):
                    self._hide(server, keys, name)
                if self._cleared(server, keys, name):
                    server.zrem(keys.used, member)  # as it lies there, be it a name or not
                return True
        except StoreFailed as error:
            if error.trouble != "full":  # then what is left is removed later
                raise
            return False

    def old(self, tenant: str, kind: Kind, after: str) -> list[str]:
        return []

    def drop_copies(self) -> None:
        """Do nothing: nothing is put aside."""

    def in_one_go(self) -> AbstractContextManager[None]:
        return nullcontext()  # it is for old entries, of which there are none

    def chores(self) -> Iterator[list[tuple[str, Kind, str]]]:
        """Remove what older releases left: it lies in plain text, and may have been changed."""
        if self._older_are_gone:
            return
        with self._reported():
            older = self._servers.client().scan_iter(match=OLDER, count=SLICE_ITEMS)
        while True:
            with self._reported():
                found = list(islice(older, SLICE_ITEMS))
                for key in found:  # each may lie in another slot
                    self._servers.client().unlink(key)
            if not found:
                self._older_are_gone = True
                return
            yield []

    def close(self) -> None:
        self._servers.close()

    @contextmanager
    def _exchange(self, keys: Keys) -> Iterator[Any]:
        with self._reported():
            yield self._servers.node_of(keys.total)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except redis.OutOfMemoryError:
            raise StoreFailed("redis is full", "full") from None
        except redis.ResponseError as error:
            said = str(error).rpartition("caused error: ")[2]  # of one in a pipeline
            if said.startswith("WRONGTYPE") or "not an integer" in said or "not a valid" in said:
                raise Misshapen("redis holds something else there") from None
            self._servers.forget()  # a key may have moved
            raise StoreFailed(f"redis refuses ({said.partition(' ')[0][:40]})") from None
        except (redis.RedisError, OSError) as error:  # its words may hold the server's address
            self._servers.forget()
            raise StoreFailed(f"redis does not answer ({type(error).__name__})") from None
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            raise Misshapen(f"redis holds something else there ({error})") from None

    def _add_items(
        self, change: Any, keys: Keys, name: str, parts: Sequence[Part], first: int, number: int
    ) -> None:
        if not parts:
            return
        change.hset(keys.items(name), mapping={x.id: x.body for x in parts})
        change.zadd(keys.order(name), {x.id: first + i for i, x in enumerate(parts)})
        for i in range(0, len(parts), SLICE_ITEMS):
            owners = [keys.owner(x.id) for x in parts[i : i + SLICE_ITEMS]]
            change.eval(OWN, len(owners), *owners, number, name, self._life_ms)

    def _tag(
        self, change: Any, keys: Keys, name: str, tags: Collection[bytes], number: int
    ) -> None:
        kind, id = split(name)
        for tag in tags:
            change.zadd(keys.list(kind, tag), {id: number})
        if tags:
            change.hset(keys.tags, name, " ".join(f"/{x.hex()}" for x in tags))

    def _untag(self, change: Any, keys: Keys, name: str, tags: bytes | None) -> None:
        kind, id = split(name)
        for tag in text(tags or b"").split():
            with suppress(ValueError):
                change.zrem(keys.list(kind, bytes.fromhex(tag[1:])), id)

    def _keep(self, change: Any, keys: Keys, name: str, session: str) -> None:
        """Give an entry its whole life again."""
        for key in (keys.entry(name), keys.items(name), keys.order(name), keys.session(session)):
            change.pexpire(key, self._life_ms)

    @property
    def _life_ms(self) -> int:
        return int(self._limits.max_age_s * 1000)

    def _hide(self, server: Any, keys: Keys, name: str) -> None:
        """Remove an entry but for the parts left to ``_cleared``; a full server takes this, too."""
        session, tags = server.hget(keys.entry(name), "session"), server.hget(keys.tags, name)
        with server.pipeline(transaction=True) as change:
            change.unlink(keys.entry(name), keys.items(name))
            self._untag(change, keys, name, tags)
            if session is not None:
                change.zrem(keys.session(text(session)), name)
            change.execute()
        with suppress(redis.OutOfMemoryError):  # else it is cleared when its time has come
            server.zadd(keys.used, {name: 0}, xx=True)

    def _cleared(self, server: Any, keys: Keys, name: str) -> bool:
        """Remove a piece of a hidden entry's remains; returns True when all is gone."""
        ids = [text(x) for x in server.zrange(keys.order(name), 0, SLICE_ITEMS - 1)]
        tags, nbytes = server.hget(keys.tags, name), server.hget(keys.sizes, name)
        with server.pipeline(transaction=True) as change:
            for id in ids:
                change.zrem(keys.owner(id), name)
            change.zremrangebyrank(keys.order(name), 0, SLICE_ITEMS - 1)
            change.execute()
        if len(ids) == SLICE_ITEMS:
            return False
        with server.pipeline(transaction=True) as change:
            self._untag(change, keys, name, tags)  # an entry that expired was not hidden
            change.hdel(keys.tags, name)
            change.hdel(keys.sizes, name)
            change.zrem(keys.used, name)
            change.decrby(keys.total, int(nbytes or 0))
            change.execute()
        return True

    def _outlived(self, server: Any, keys: Keys) -> bytes | None:
        """Return an entry that is to go: deleted, too old, or the budget's last."""
        with server.pipeline(transaction=False) as asked:
            asked.zrange(keys.used, 0, 0, withscores=True)
            asked.get(keys.total)
            first, total = asked.execute()
        if not first:
            if total and total != b"0":  # the server evicted what this was counted by
                server.delete(keys.total)
            return None
        ((name, used),) = first
        too_old = used < self._clock() - self._limits.max_age_s
        return name if too_old or int(total or 0) > self._limits.tenant_bytes else None
