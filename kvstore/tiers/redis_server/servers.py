"""One server or the nodes of a cluster, asked in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import urlsplit

import redis
from redis.exceptions import AskError, MovedError

from kvstore.tiers.redis_server.primaries import CLUSTER, Cluster, open_pool

Command: TypeAlias = tuple[bytes | str | int | memoryview, ...]
# A reply as redis-py returns it; for a command that the server refused, the list has its error.
Reply: TypeAlias = Any
# Raises when the time for a batch is over.
CheckTime: TypeAlias = Callable[[], None]

# Between commands of a batch: what follows is sent to no server before all others have answered.
THEN: Final[Command] = ()
_KEYLESS: Final = frozenset({"PING", "TIME", "INFO", "SCAN"})
_ASKING: Final[Command] = ("ASKING",)


def unbounded() -> None:
    """Check no time: the connections' own limits hold."""


class Servers(Protocol):
    """Asks one server, or the nodes of a cluster. Thread-safe.

    The methods raise ``redis.RedisError`` or ``OSError`` when a server does not answer.
    """

    def in_order(self, commands: Sequence[Command]) -> Iterable[Sequence[Command]]:
        """Return the batches that are sent one after another."""

    def ask(self, commands: Sequence[Command], check_time: CheckTime) -> list[Reply]:
        """Send a batch and return the replies, in its order."""

    def pools(self, check_time: CheckTime = unbounded) -> list[Any]:
        """Return a pool of connections, redis-py's, for each server that has keys."""

    def pool_of(self, key: bytes, check_time: CheckTime = unbounded) -> Any:
        """Return the pool of the server that has a key."""

    def forget(self) -> None:
        """Forget which server has which keys: one has failed."""

    def close(self) -> None:
        """Close all connections."""


def open_servers(url: str, **options: Any) -> Servers:
    """Open what a URL names; nothing is connected before the first use.

    Args:
        options: see ``pools.open_pool``.

    Raises ``ValueError``: not a URL. The message may repeat its password.
    """
    if urlsplit(url).scheme.endswith(CLUSTER):
        return _ClusterServers(url, **options)
    return _OneServer(open_pool(url, **options))


class _OneServer:
    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def in_order(self, commands: Sequence[Command]) -> Iterable[Sequence[Command]]:
        yield [x for x in commands if x is not THEN] if THEN in commands else commands

    def ask(self, commands: Sequence[Command], check_time: CheckTime) -> list[Reply]:
        return exchange([(self._pool, commands)], check_time)[0]

    def pools(self, check_time: CheckTime = unbounded) -> list[Any]:
        return [self._pool]

    def pool_of(self, key: bytes, check_time: CheckTime = unbounded) -> Any:
        return self._pool

    def forget(self) -> None:
        pass

    def close(self) -> None:
        self._pool.disconnect()


class _ClusterServers(Cluster):
    def in_order(self, commands: Sequence[Command]) -> Iterable[Sequence[Command]]:
        batch: list[Command] = []
        for command in commands:
            if command is not THEN:
                batch.append(command)
            elif batch:
                yield batch
                batch = []
        if batch:
            yield batch

    def ask(self, commands: Sequence[Command], check_time: CheckTime) -> list[Reply]:
        replies = self._ask(commands, check_time)
        moved = [i for i, x in enumerate(replies) if isinstance(x, MovedError)]
        if moved:
            # A command that was refused so was not carried out: it is sent once more, elsewhere.
            self.forget()
            again = self._ask([commands[i] for i in moved], check_time)
            for i, reply in zip(moved, again, strict=True):
                replies[i] = reply
        for i, reply in enumerate(replies):
            if isinstance(reply, AskError) and not isinstance(reply, MovedError):
                pool = self.pool_at((reply.host, reply.port))
                replies[i] = exchange([(pool, [_ASKING, commands[i]])], check_time)[0][1]
        return replies

    def _ask(self, commands: Sequence[Command], check_time: CheckTime) -> list[Reply]:
        slots = self.slots(check_time)
        keys = [_key_of(x) for x in commands]
        first = next((x for x in keys if x is not None), b"")
        positions: dict[int, list[int]] = {}
        pools: dict[int, Any] = {}
        for i, key in enumerate(keys):
            pool = slots.pool_of(first if key is None else key)
            pools[id(pool)] = pool
            positions.setdefault(id(pool), []).append(i)
        asked = [(pools[x], [commands[i] for i in there]) for x, there in positions.items()]
        replies: list[Reply] = [None] * len(commands)
        for there, came in zip(positions.values(), exchange(asked, check_time), strict=True):
            for i, reply in zip(there, came, strict=True):
                replies[i] = reply
        return replies

    def pools(self, check_time: CheckTime = unbounded) -> list[Any]:
        return self.slots(check_time).pools

    def pool_of(self, key: bytes, check_time: CheckTime = unbounded) -> Any:
        return self.slots(check_time).pool_of(key)


def _key_of(command: Command) -> bytes | None:
    """Return a command's first key; None if it has none."""
    name = command[0]
    if name in _KEYLESS:
        return None
    key = command[3] if name == "EVAL" else command[1]
    return key.encode() if isinstance(key, str) else bytes(key)


def exchange(
    asked: Sequence[tuple[Any, Sequence[Command]]], check_time: CheckTime
) -> list[list[Reply]]:
    """Send each pool its commands, then read all replies.

    Raises:
        redis.RedisError: a server is not reached, or did not answer.
        OSError: likewise.
    """
    with ExitStack() as held:
        connections = [held.enter_context(_connection(pool)) for pool, _ in asked]
        for connection, (_, commands) in zip(connections, asked, strict=True):
            for packed in connection.pack_commands(commands):
                check_time()
                connection.send_packed_command([packed])
        replies = []
        for connection, (_, commands) in zip(connections, asked, strict=True):
            came = []
            for _ in commands:
                check_time()
                came.append(_read(connection))
            replies.append(came)
        return replies


@contextmanager
def _connection(pool: Any) -> Iterator[Any]:
    connection = pool.get_connection()
    whole = False
    try:
        yield connection
        whole = True
    finally:
        if not whole:  # replies may still arrive: no other command may read them
            connection.disconnect()
        pool.release(connection)


def _read(connection: Any) -> Reply:
    """Read one reply; a refusal by the server is returned, a broken connection raises."""
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error
