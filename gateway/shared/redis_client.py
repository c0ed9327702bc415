"""The gateway's client of a Redis, Sentinel or Cluster: on the event loop, within a time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from kvstore.errors import TierUnavailable

if TYPE_CHECKING:
    from redis.asyncio.client import PubSub

Command: TypeAlias = tuple[Any, ...]
Reply: TypeAlias = Any
T = TypeVar("T")

AWAY_S: Final = 1.0  # for so long after a failure all calls fail at once
FIRST_LOOKS: Final = 5  # at the server's clock; the quickest one is used
JUMP_S: Final = 0.5  # a larger change of the offset means that a clock was set
QUIET_S: Final = 15.0  # a subscription that is silent for so long is checked by a ping


class AsyncRedis:
    """Runs commands. After a failure the server is not asked again for ``AWAY_S``.

    Args:
        url: as in ``store.redis_url``. The first call connects.
        deadline_s: the longest time of one call, including connecting.

    Raises:
        ImportError: redis-py is not installed.
        ValueError: ``url`` is malformed. The message may repeat its password.
    """

    def __init__(
        self, url: str, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        import redis.asyncio as library  # redis-py is an extra
        from redis import RedisError
        from redis.asyncio.cluster import ClusterNode
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        from kvstore.tiers.redis_server.client import Library, opener_of

        self._errors: tuple[type[Exception], ...] = (RedisError, OSError, TimeoutError)
        self._redis = library
        self._opener = opener_of(
            url,
            {
                "socket_timeout": deadline_s,
                "socket_connect_timeout": deadline_s,
                "retry": Retry(NoBackoff(), 0),
            },
            Library(library.Redis, library.RedisCluster, ClusterNode, library.Sentinel),
        )
        self._deadline_s = deadline_s
        self._clock = clock
        self._client: Any = None
        self._away_until = float("-inf")
        self._offset_s: float | None = None

    # ---- calls

    async def run(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands whose keys are in one slot; return the replies in order.

        The reply to a command that failed is an exception. Raises ``TierUnavailable``.
        """

        async def sent(client: Any) -> list[Reply]:
            async with client.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                replies: list[Reply] = await pipe.execute(raise_on_error=False)
                return replies

        return await self.within(sent) if commands else []

    async def publish(self, channel: str, message: bytes) -> None:
        """Send a message to all subscribers of a channel. Raises ``TierUnavailable``."""
        await self.within(lambda client: client.publish(channel, message))

    async def look_at_clock(self) -> None:
        """Measure the offset of the server's clock to ours; keep the known one unless it jumped.

        Raises ``TierUnavailable``.
        """
        looks = [await self._look() for _ in range(FIRST_LOOKS if self._offset_s is None else 1)]
        offset_s = min(looks)[1]
        if self._offset_s is None or abs(offset_s - self._offset_s) > JUMP_S:
            self._offset_s = offset_s  # else kept, so that a moment is always translated alike

    async def _look(self) -> tuple[float, float]:
        """Read the server's clock; return how long that took, and its offset to ours."""
        before = self._clock()
        reply = await self.within(self._time)
        after = self._clock()
        return after - before, int(reply[0]) + int(reply[1]) / 1e6 - (before + after) / 2

    async def _time(self, client: Any) -> Reply:
        if not isinstance(client, self._redis.RedisCluster):
            return await client.time()
        await client.initialize()
        reply = await client.time(target_nodes=client.get_default_node())
        return next(iter(reply.values())) if isinstance(reply, dict) else reply

    def server_time(self, at: float) -> float | None:
        """Convert a time of our clock to the server's, in seconds; None if that is unknown."""
        return None if self._offset_s is None else at + self._offset_s

    def now(self) -> float | None:
        """Return the server's time, in seconds; None while the offset is unknown."""
        return self.server_time(self._clock())

    async def within(self, call: Callable[[Any], Awaitable[T]]) -> T:
        """Return ``call(client)`` of redis-py's client, awaited within the time limit.

        Raises ``TierUnavailable``.
        """
        if self._clock() < self._away_until:
            raise TierUnavailable("redis did not answer lately")
        try:
            async with asyncio.timeout(self._deadline_s):
                result = await call(self._opened())
                _check_cancelled()
                return result
        except self._errors as error:
            self._away_until = self._clock() + AWAY_S
            raise TierUnavailable(f"redis: {type(error).__name__}") from None

    # ---- messages

    @asynccontextmanager
    async def subscribed(self, channel: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Subscribe to a channel inside the context, which gives an iterator over its messages.

        Raises ``TierUnavailable``, also from the iterator: the connection was lost, and messages
        may have been missed.
        """
        pubsub: PubSub | None = None
        try:
            try:
                async with asyncio.timeout(self._deadline_s):
                    pubsub = await self._subscriber()
                    await pubsub.subscribe(channel)
                    while await pubsub.get_message(timeout=self._deadline_s) is None:
                        _check_cancelled()  # waits for the reply to SUBSCRIBE
            except self._errors as error:
                raise TierUnavailable(f"redis: {type(error).__name__}") from None
            yield self._messages(pubsub)
        finally:
            if pubsub is not None:
                with suppress(*self._errors):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _messages(self, pubsub: PubSub) -> AsyncIterator[bytes]:
        silent_s = 0.0
        try:
            while True:
                message = await pubsub.get_message(timeout=1.0)
                _check_cancelled()
                silent_s = silent_s + 1.0 if message is None else 0.0
                if silent_s >= QUIET_S:
                    silent_s = 0.0
                    async with asyncio.timeout(self._deadline_s):
                        await pubsub.ping()
                if message is not None and message["type"] == "subscribe":
                    raise TierUnavailable("redis: the connection was lost and made again")
                if message is not None and message["type"] == "message":
                    yield message["data"]
        except self._errors as error:
            raise TierUnavailable(f"redis: {type(error).__name__}") from None

    async def _subscriber(self) -> PubSub:
        client = self._opened()
        if isinstance(client, self._redis.RedisCluster):
            await client.initialize()
            node = client.get_random_node()  # every node gets all messages
            options = dict(node.connection_kwargs)
            options |= {"host": node.host, "port": node.port}
            client = self._redis.Redis(
                connection_pool=self._redis.ConnectionPool(
                    node.connection_class, max_connections=1, **options
                )
            )
        return client.pubsub()  # type: ignore[no-any-return]

    # ---- connections

    def _opened(self) -> Any:
        if self._client is None:
            self._client = self._opener.open()
        return self._client

    async def close(self) -> None:
        """Close all connections; the next call opens others."""
        clients, self._client = [*self._opener.sentinels, self._client], None
        for client in clients:
            if client is not None:
                with suppress(*self._errors):
                    await client.aclose()


def _check_cancelled() -> None:
    """Raise ``CancelledError`` if the task was cancelled: redis-py swallows it while connecting."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
