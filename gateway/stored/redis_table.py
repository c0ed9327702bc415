"""Stored objects on a Redis or Valkey server: the place that several gateways share.

    thermocline:stored:3:{tenant}:row:NAME   head, number and pages of a row
                                 :index      its terms: TERM, number and name, in one sorted set
                                 :terms      the terms of each row by its name
                                 :used       names by the time of last use; 0: deleted
                                 :sizes, :total   bytes of each row by its name, and of all
                                 :seq        the last number

``tenant`` is a keyed hash of the name: the server sees no tenants' names. All keys of a tenant lie
in one slot of a cluster, and each change is one transaction. A row expires by itself, and the
server may evict it at any time; what the index still says of it then is passed over. What a
deletion needs is done on a full server, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from gateway.stored.table import (
    ROW_BYTES,
    SLICE_ITEMS,
    TERM_BYTES,
    Misshapen,
    StoredLimits,
    StoreFailed,
    Top,
    Write,
    size_of,
)

try:
    import redis

    from kvstore.tiers.redis_server.client import RedisServers
except ImportError as error:
    raise ImportError("redis_url needs redis-py: pip install 'thermocline[redis]'") from error

SPACE = "thermocline:stored:3"
PLAIN = "thermocline:stored:{*"  # pattern of the keys of releases that sealed nothing
_NUMBER_BYTES = 8


class Keys:
    def __init__(self, tenant: str) -> None:
        self._prefix = f"{SPACE}:{{{tenant}}}"
        self.index, self.terms, self.used, self.sizes, self.total, self.seq = (
            f"{self._prefix}:{x}" for x in ("index", "terms", "used", "sizes", "total", "seq")
        )

    def row(self, name: str) -> str:
        return f"{self._prefix}:row:{name}"


class RedisTable:
    """Implements ``table.Table`` on a server or cluster, which is connected to at the first use.

    Args:
        hidden: makes the word that stands for a tenant in the names of keys.
        deadline_s: for one exchange with the server.
        clock: gives seconds since 1970; gateways that share a server need about the same time.
    """

    place = "redis"

    def __init__(
        self,
        url: str,
        limits: StoredLimits,
        hidden: Callable[[str], str],
        deadline_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._hidden = hidden
        self._clock = clock
        self._life_ms = int(limits.max_age_s * 1000)
        self._plain_is_gone = False
        self._servers = RedisServers(url, deadline_s)

    def find_all(self, tenant: str, names: Sequence[str], *, uses: bool) -> list[Top | None]:
        with self._exchange(tenant) as (server, keys), server.pipeline(transaction=False) as asked:
            for name in names:
                asked.hmget(keys.row(name), "head", "number")
            found = [None if None in x else Top(int(x[1]), x[0]) for x in asked.execute()]
        if uses and (used := [x for x, top in zip(names, found, strict=True) if top]):
            self._use(tenant, used)
        return found

    def pages(self, tenant: str, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        with self._exchange(tenant) as (server, keys):
            return list(server.hmget(keys.row(name), numbers)) if numbers else []

    def listed(
        self, tenant: str, term: bytes, beyond: int | None, *, ascending: bool, limit: int
    ) -> list[tuple[int, str]]:
        least, most = b"[" + term, b"(" + term + b"\xff" * (_NUMBER_BYTES + 1)
        if beyond is not None and ascending:
            least = b"[" + term + (beyond + 1).to_bytes(_NUMBER_BYTES)
        elif beyond is not None:
            most = b"(" + term + beyond.to_bytes(_NUMBER_BYTES)
        with self._exchange(tenant) as (server, keys):
            if ascending:
                found = server.zrangebylex(keys.index, least, most, start=0, num=limit)
            else:
                found = server.zrevrangebylex(keys.index, most, least, start=0, num=limit)
        at = TERM_BYTES + _NUMBER_BYTES
        return [(int.from_bytes(x[TERM_BYTES:at]), _text(x[at:])) for x in found]

    def write(self, tenant: str, name: str, write: Write) -> bool:
        with self._exchange(tenant) as (server, keys):
            if not (server.get(keys.total) or b"0").removeprefix(b"-").isdigit():
                server.delete(keys.total)  # no number of ours: it is counted anew
            if write.was is None:
                while not self._written(server, keys, name, write):
                    self._remove(server, keys, name)
                return True
            return self._written(server, keys, name, write)

    def delete(self, tenant: str, name: str) -> bool:
        with self._exchange(tenant) as (server, keys):
            there = bool(server.exists(keys.row(name)))
            if there:
                self._remove(server, keys, name)
            return there

    def drop_copies(self) -> None:
        """Do nothing: nothing is put aside."""

    def tidy(self, tenant: str) -> bool:
        try:
            with self._exchange(tenant) as (server, keys):
                member = self._outlived(server, keys)
                if member is None:
                    return False
                self._remove(server, keys, _text(member))
                server.zrem(keys.used, member)  # as it lies there, be it a name or not
                return True
        except StoreFailed as error:
            if error.trouble != "full":  # then what is left is removed later
                raise
            return False

    def chores(self) -> Iterator[None]:
        """Remove what old releases left in plain text: it may have been changed."""
        while not self._plain_is_gone:
            with _reported(self._servers):
                client = self._servers.client()
                found = list(islice(client.scan_iter(PLAIN, SLICE_ITEMS), SLICE_ITEMS))
                for key in found:
                    client.unlink(key)
            self._plain_is_gone = not found
            yield

    def close(self) -> None:
        self._servers.close()

    @contextmanager
    def _exchange(self, tenant: str) -> Iterator[tuple[Any, Keys]]:
        keys = Keys(self._hidden(tenant))
        with _reported(self._servers):
            yield self._servers.node_of(keys.total), keys

    def _written(self, server: Any, keys: Keys, name: str, write: Write) -> bool:
        """Write in one transaction; False if the row is not the one that this is made for."""
        row = keys.row(name)
        with server.pipeline(transaction=True) as made:
            made.watch(row)
            head, number, sizes = made.hget(row, "head"), made.hget(row, "number"), keys.sizes
            if head != write.was or (head is None and made.hexists(sizes, name)):
                return False
            grown = size_of(write.head, write.pages)
            if head is None:
                number = made.incr(keys.seq)
            else:
                gone = [made.hstrlen(row, str(x)) + ROW_BYTES for x in write.dropped]
                grown -= len(head) + ROW_BYTES + sum(gone)
            before = _terms_of(made.hget(keys.terms, name))
            terms = (before - set(write.left)) | set(write.terms)
            pages = {str(x): content for x, content in write.pages.items()}
            made.multi()
            made.hset(row, mapping={"head": write.head, "number": number, **pages})
            if write.dropped:
                made.hdel(row, *map(str, write.dropped))
            if gone_terms := before - terms:
                made.zrem(keys.index, *_members(gone_terms, int(number), name))
            if new_terms := terms - before:
                made.zadd(keys.index, dict.fromkeys(_members(new_terms, int(number), name), 0))
            made.hset(keys.terms, name, b"".join(sorted(terms)))
            made.zadd(keys.used, {name: self._clock()})
            made.hincrby(sizes, name, grown)
            made.incrby(keys.total, grown)
            self._keep(made, keys, name)
            try:
                made.execute()
            except redis.WatchError:
                return False
            return True

    def _use(self, tenant: str, names: Sequence[str]) -> None:
        with (
            suppress(StoreFailed),
            self._exchange(tenant) as (server, keys),
            server.pipeline() as change,
        ):
            self._keep(change, keys, *names)
            change.zadd(keys.used, dict.fromkeys(names, self._clock()), xx=True)
            change.execute()

    def _keep(self, change: Any, keys: Keys, *names: str) -> None:
        """Give rows their whole life again, and all that is said of them."""
        about = (keys.index, keys.terms, keys.used, keys.sizes, keys.total, keys.seq)
        for key in (*map(keys.row, names), *about):
            change.pexpire(key, self._life_ms)

    def _remove(self, server: Any, keys: Keys, name: str) -> None:
        """Remove a row, and all that is said of it; a full server takes the first half, too."""
        number, terms, nbytes = (
            server.hget(keys.row(name), "number"),
            _terms_of(server.hget(keys.terms, name)),
            server.hget(keys.sizes, name),
        )
        with server.pipeline(transaction=True) as change:
            change.unlink(keys.row(name))
            if terms and number is not None:
                change.zrem(keys.index, *_members(terms, int(number), name))
            change.execute()
        with suppress(redis.OutOfMemoryError):
            server.zadd(keys.used, {name: 0}, xx=True)  # else it is counted out when it is old
        with server.pipeline(transaction=True) as change:
            change.hdel(keys.terms, name)
            change.hdel(keys.sizes, name)
            change.zrem(keys.used, name)
            change.decrby(keys.total, int(nbytes or 0))
            with suppress(redis.OutOfMemoryError):
                change.execute()

    def _outlived(self, server: Any, keys: Keys) -> bytes | None:
        """Return a row that is to go: deleted, too old, or the budget's last."""
        with server.pipeline(transaction=False) as asked:
            asked.zrange(keys.used, 0, 0, withscores=True)
            asked.get(keys.total)
            first, total = asked.execute()
        if not first:
            if total and total != b"0":  # the server evicted what this was counted by
                server.delete(keys.total)
            return None
        ((name, used),) = first
        too_old = used < self._clock() - self.limits.max_age_s
        return name if too_old or int(total or 0) > self.limits.tenant_bytes else None


@contextmanager
def _reported(servers: RedisServers) -> Iterator[None]:
    try:
        yield
    except redis.OutOfMemoryError:
        raise StoreFailed("redis is full", "full") from None
    except redis.ResponseError as error:
        said = str(error).rpartition("caused error: ")[2]  # of one in a pipeline
        if said.startswith("WRONGTYPE") or "not an integer" in said or "not a valid" in said:
            raise Misshapen("redis holds something else there") from None
        servers.forget()  # a key may have moved
        raise StoreFailed(f"redis refuses ({said.partition(' ')[0][:40]})") from None
    except (redis.RedisError, OSError) as error:  # its words may hold the server's address
        servers.forget()
        raise StoreFailed(f"redis does not answer ({type(error).__name__})") from None
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise Misshapen(f"redis holds something else there ({error})") from None


def _members(terms: Collection[bytes], number: int, name: str) -> list[bytes]:
    rest = number.to_bytes(_NUMBER_BYTES) + name.encode()
    return [x + rest for x in terms]


def _terms_of(packed: bytes | None) -> set[bytes]:
    said = packed or b""
    return {said[i : i + TERM_BYTES] for i in range(0, len(said), TERM_BYTES)}


def _text(said: bytes) -> str:
    """Read a name; what is none becomes one that nothing has."""
    return said.decode(errors="replace")
