"""Stored objects on a Redis or Valkey server, which several gateways share.

    thermocline:stored:3:{tenant}:row:NAME   hash: head, number and pages of a row
                                 :index      sorted set: TERM, number and name of each entry
                                 :terms      hash: name -> the row's terms and its number
                                 :used       sorted set: names by the time of last use
                                 :sizes, :total   bytes of each row by name, and of all rows
                                 :seq        the last number

``tenant`` is a keyed hash, so that the server sees no tenants' names. All keys of a tenant lie in
one slot of a cluster, and each change is one transaction. A row expires by itself, and the server
may evict it at any time; entries of the index without a row are skipped. A deletion also works on a
full server, but its bytes may then stay counted until the row would have expired.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Final

from gateway.stored.table import (
    SLICE_ITEMS,
    TERM_BYTES,
    Misshapen,
    Steps,
    StoredLimits,
    StoreFailed,
    Top,
    Write,
)

try:
    import redis

    from kvstore.tiers.redis_server.client import RedisServers
except ImportError as error:
    raise ImportError("redis_url needs redis-py: pip install 'thermocline[redis]'") from error

_NUMBER_BYTES: Final = 8
_PLAIN: Final = "thermocline:stored:{*"  # the keys of releases that did not encrypt
_PLAIN_AT_ONCE: Final = 64


class Keys:
    def __init__(self, tenant: str) -> None:
        self._prefix = f"thermocline:stored:3:{{{tenant}}}"
        self.all = tuple(
            f"{self._prefix}:{x}" for x in ("index", "terms", "used", "sizes", "total", "seq")
        )
        self.index, self.terms, self.used, self.sizes, self.total, self.seq = self.all

    def row(self, name: bytes) -> bytes:
        return f"{self._prefix}:row:".encode() + name


class RedisTable:
    """Implements ``table.Table`` on a server or cluster; connects at the first use.

    Args:
        hidden: returns the word that stands for a tenant in keys.
        deadline_s: the longest time of one exchange with the server.
        clock: returns Unix time; the clocks of gateways that share a server should agree.
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
        self._plain_is_bounded = False
        self._servers = RedisServers(url, deadline_s)

    def find_all(self, tenant: str, names: Sequence[str], *, uses: bool) -> list[Top | None]:
        with self._exchange(tenant) as (server, keys), server.pipeline(transaction=False) as asked:
            for name in names:
                asked.hmget(keys.row(name.encode()), "head", "number")
            found = [None if None in x else Top(int(x[1]), x[0]) for x in asked.execute()]
        if uses and (used := [x for x, top in zip(names, found, strict=True) if top]):
            with suppress(StoreFailed):  # a server that is full or read-only can still be read
                self._use(tenant, used)
        return found

    def pages(self, tenant: str, name: str, numbers: Sequence[int]) -> list[bytes | None]:
        with self._exchange(tenant) as (server, keys):
            return list(server.hmget(keys.row(name.encode()), numbers)) if numbers else []

    def listed(
        self, tenant: str, term: bytes, beyond: int | None, *, ascending: bool
    ) -> list[tuple[int, str]]:
        least, most = b"[" + term, b"(" + term + b"\xff" * (_NUMBER_BYTES + 1)
        if beyond is not None and ascending:
            least = b"[" + term + (beyond + 1).to_bytes(_NUMBER_BYTES)
        elif beyond is not None:
            most = b"(" + term + beyond.to_bytes(_NUMBER_BYTES)
        with self._exchange(tenant) as (server, keys):
            if ascending:
                found = server.zrangebylex(keys.index, least, most, 0, SLICE_ITEMS)
            else:
                found = server.zrevrangebylex(keys.index, most, least, 0, SLICE_ITEMS)
        at = TERM_BYTES + _NUMBER_BYTES
        return [(int.from_bytes(x[TERM_BYTES:at]), x[at:].decode(errors="replace")) for x in found]

    def write(self, tenant: str, name: str, write: Write) -> bool:
        with self._exchange(tenant) as (server, keys):
            id = name.encode()
            row = keys.row(id)

            def change(made: Any) -> bool:
                head, said = made.hmget(row, "head", "number")
                if write.was is not None and head != write.was:
                    return False
                if not (made.get(keys.total) or b"0").removeprefix(b"-").isdigit():
                    made.delete(keys.total)  # not a number that we wrote: count anew
                nbytes = _number(made.hget(keys.sizes, id))
                terms, before = _indexed(made, keys, id, said)
                number = int(said) if write.was is not None else made.incr(keys.seq)
                left = write.left if write.was is not None else terms
                gone, new = _members(left, before, id), _members(write.terms, number, id)
                terms = terms.difference(left).union(write.terms)
                fields: dict[Any, Any] = {"head": write.head, "number": number, **write.pages}
                made.multi()
                if write.was is None:
                    made.unlink(row)
                made.hset(row, mapping=fields)
                if write.dropped:
                    made.hdel(row, *write.dropped)
                if gone:
                    made.zrem(keys.index, *gone)
                if new:
                    made.zadd(keys.index, dict.fromkeys(new, 0))
                made.hset(keys.terms, name, b"".join((*sorted(terms), _packed(number))))
                made.zadd(keys.used, {name: self._clock()})
                made.hset(keys.sizes, name, write.nbytes)
                made.incrby(keys.total, write.nbytes - nbytes)
                self._keep(made, keys, [id])
                return True

            return bool(server.transaction(change, row, value_from_callable=True))

    def delete(self, tenant: str, names: Sequence[str]) -> int:
        with self._exchange(tenant) as (server, keys):
            return sum(self._remove(server, keys, x.encode())[0] for x in names)

    def tidy(self, tenant: str) -> bool:
        with self._exchange(tenant) as (server, keys):
            with server.pipeline(transaction=False) as asked:
                asked.zrange(keys.used, 0, 0, withscores=True)
                asked.get(keys.total)
                first, total = asked.execute()
            if not first:
                if total and total != b"0":  # the server has evicted the sizes
                    server.delete(keys.total)
                return False
            ((name, used),) = first
            too_old = used < self._clock() - self.limits.max_age_s
            if not too_old and int(total or 0) <= self.limits.tenant_bytes:
                return False
            return self._remove(server, keys, name)[1]

    def chores(self) -> Steps[None]:
        """Let the keys of old releases expire, which are not read any more."""
        if self._plain_is_bounded:
            return
        with self._reported():
            client = self._servers.client()
            keys = client.scan_iter(_PLAIN, SLICE_ITEMS)
            while some := list(islice(keys, _PLAIN_AT_ONCE)):
                for key in some:
                    if client.pttl(key) == -1:
                        client.pexpire(key, self._life_ms)
                yield 0
        self._plain_is_bounded = True

    def close(self) -> None:
        self._servers.close()

    @contextmanager
    def _exchange(self, tenant: str) -> Iterator[tuple[Any, Keys]]:
        keys = Keys(self._hidden(tenant))
        with self._reported():
            yield self._servers.node_of(keys.total), keys

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except redis.OutOfMemoryError:
            raise StoreFailed("redis is full", "full") from None
        except redis.ResponseError as error:
            said = str(error).rpartition("caused error: ")[2]  # without a pipeline's prefix
            if said.startswith("WRONGTYPE") or "not an integer" in said or "not a valid" in said:
                raise Misshapen("redis holds something else there") from None
            self._servers.forget()  # a key may have moved
            raise StoreFailed(f"redis refuses ({said.partition(' ')[0][:40]})") from None
        except (redis.RedisError, OSError) as error:  # whose message may have the server's address
            self._servers.forget()
            raise StoreFailed(f"redis does not answer ({type(error).__name__})") from None
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            raise Misshapen(f"redis holds something else there ({error})") from None

    def _use(self, tenant: str, names: Sequence[str]) -> None:
        with self._exchange(tenant) as (server, keys), server.pipeline(False) as change:
            self._keep(change, keys, [x.encode() for x in names])
            change.zadd(keys.used, dict.fromkeys(names, self._clock()), xx=True)
            change.execute()

    def _keep(self, change: Any, keys: Keys, names: Sequence[bytes]) -> None:
        """Renew the time to live of rows, and of the keys that index them."""
        for key in (*map(keys.row, names), *keys.all):
            change.pexpire(key, self._life_ms)

    def _remove(self, server: Any, keys: Keys, name: bytes) -> tuple[bool, bool]:
        """Remove a row and its index; if two servers do so at once, its size is subtracted once.

        Returns whether the row existed, and whether its size was subtracted, which a full server
        may refuse.
        """
        row, there = keys.row(name), False

        def change(made: Any) -> None:
            number, nbytes = made.hget(row, "number"), _number(made.hget(keys.sizes, name))
            listed = _members(*_indexed(made, keys, name, number), name)
            made.multi()
            made.unlink(row)
            if listed:
                made.zrem(keys.index, *listed)
            made.hdel(keys.terms, name)
            made.hdel(keys.sizes, name)
            made.zrem(keys.used, name)
            if nbytes:
                made.decrby(keys.total, nbytes)
                made.pexpire(keys.total, self._life_ms)

        for _ in range(2):
            try:
                return bool(server.transaction(change, row, keys.sizes)[0]) or there, True
            except redis.OutOfMemoryError:  # a full server refuses any transaction
                number = server.hget(row, "number")
                listed = _members(*_indexed(server, keys, name, number), name)
                there |= bool(server.unlink(row))
                if listed:
                    server.zrem(keys.index, *listed)
        return there, False


def _indexed(
    server: Any, keys: Keys, name: bytes, number: bytes | None
) -> tuple[set[bytes], int | None]:
    """Return the terms and the number of a row's entries in the index.

    ``number``: the one in the row; None if the row was evicted.
    """
    said = server.hget(keys.terms, name) or b""
    end = len(said) // TERM_BYTES * TERM_BYTES
    terms = {said[i : i + TERM_BYTES] for i in range(0, end, TERM_BYTES)}
    if number is not None:
        return terms, int(number)
    kept = said[end:]
    return terms, int.from_bytes(kept) if len(kept) == _NUMBER_BYTES else None


def _members(terms: Collection[bytes], number: int | None, name: bytes) -> list[bytes]:
    if number is None:
        return []
    return [x + _packed(number) + name for x in terms]


def _packed(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES)


def _number(said: bytes | None) -> int:
    return int(said) if said and said.isdigit() else 0
