"""Counts what keys use in a minute, by the library ``limits``.

The window slides: the previous minute counts by the part of it that lies within the last 60 s.
Gateways that share a Redis count there together. While Redis does not answer, each gateway counts
by itself and no request fails; the log and a metric report it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import floor
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.storage.redis.redispy import RedispyBridge
from limits.aio.strategies import SlidingWindowCounterRateLimiter as Limiter

from kvstore.errors import TierUnavailable

MINUTE_S: Final = 60.0
# Units in which each use is counted: the library takes integers, and a read costs 0.1 requests.
PARTS: Final[Mapping[str, int]] = {"requests": 100, "tokens": 1}
SPACE: Final = "thermocline:rates"
MAX_ASKING: Final = 8  # calls at once: each has a connection to Redis
WAIT_S: Final = 1.0  # for a connection and the answer to one call
LOOK_S: Final = 0.5  # between two checks whether Redis answers
WARN_EVERY_S: Final = 60.0  # between two warnings that it does not
AGAIN_S: Final = 1.0

log = logging.getLogger("thermocline.limits")
T = TypeVar("T")
Most: TypeAlias = Mapping[str, int]  # "requests" and "tokens" that a key may use in a minute


class MinuteUse(NamedTuple):
    """A key's use of one limit in the previous and the current minute, in units of 1 / ``parts``.

    ``previous_s`` and ``current_s`` are the seconds until that minute's use no longer counts.
    ``most``: the limit, in the same units.
    """

    most: int
    parts: int
    previous: int = 0
    previous_s: float = 0.0
    current: int = 0
    current_s: float = 0.0

    @property
    def used(self) -> int:
        return floor(self.previous * self.previous_s / MINUTE_S) + self.current

    @property
    def remaining(self) -> int:
        """The number of whole requests or tokens that may be used now."""
        return max(0, self.most - self.used) // self.parts

    @property
    def reset_s(self) -> float:
        """Seconds until no use counts any more."""
        return self.current_s if self.current else self.previous_s if self.previous else 0.0

    def wait_s(self, number: float) -> float:
        """Return the seconds until ``number`` more may be used; 0 if it may be now."""
        room = self.most - min(self.most, round(number * self.parts))
        if self.used <= room:
            return 0.0
        # ``used`` is rounded down, hence "+ 1": room comes just before a whole unit less counts.
        if self.current <= room:  # wait until less of the previous minute counts
            return self.previous_s - (room - self.current + 1) * MINUTE_S / self.previous
        return self.current_s - (room + 1) * MINUTE_S / self.current  # the current one, by then old

    def plus(self, number: float) -> MinuteUse:
        """Return a copy with ``number`` more used."""
        more = self.current + round(number * self.parts)
        return self._replace(current=more, current_s=self.current_s or 2 * MINUTE_S)


class Taken(NamedTuple):
    """A key's windows after a request was counted, by limit.

    ``refused`` is the limit that had no room, "" if none; ``wait_s``: until there may be room.
    """

    windows: Mapping[str, MinuteUse] = {}
    refused: str = ""
    wait_s: float = 0.0


class RunsOnRedis(Protocol):
    """A client of a Redis; see ``gateway.shared.redis_client``. Raises ``TierUnavailable``."""

    async def run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]: ...

    async def within(self, call: Callable[[Any], Awaitable[T]]) -> T: ...

    async def close(self) -> None: ...


class _OnClient(RedisStorage):
    """The library's storage on our own Redis client, which also supports Sentinel and Cluster."""

    def __init__(self, client: Any) -> None:
        self.client = client
        super().__init__("redis://", implementation="redispy", key_prefix=SPACE)

    def configure_bridge(self) -> None:
        assert isinstance(self.bridge, RedispyBridge)
        self.bridge.storage = self.client
        self.bridge.connection_getter = lambda readonly: self.client


class Rates:
    """The counts of all keys. Runs on the event loop."""

    def __init__(
        self,
        redis: RunsOnRedis | None = None,
        name_of: Callable[[str], str] = str,
        on_change: Callable[[bool], None] = lambda _: None,
        wait_s: float = WAIT_S,
    ) -> None:
        """
        Args:
            redis: closed by ``run`` at its end; None: only this gateway counts.
            name_of: returns the name in Redis of a key's id, which must not reveal the id.
            on_change: called with True when counting on Redis begins, and with False when it stops.
            wait_s: the longest time of a call, including the wait for a connection.
        """
        self._redis = redis
        self._name_of = name_of
        self.on_change = on_change
        self._wait_s = wait_s
        self._local = Limiter(MemoryStorage())
        self._shared: tuple[Any, Limiter] | None = None  # a Redis client, and the limiter on it
        self._asking = asyncio.Semaphore(MAX_ASKING)
        self._counting: dict[asyncio.Task[None], str] = {}  # tokens, by key
        self._is_shared: bool | None = None  # None: not known yet
        self._warned_at = float("-inf")

    @property
    def on_redis(self) -> bool:
        """True if ``run`` is needed."""
        return self._redis is not None

    @property
    def trouble(self) -> bool:
        """True while this gateway counts by itself, though it has a Redis."""
        return self.on_redis and not self._is_shared

    async def take(self, key: str, most: Most, number: float, computes: bool) -> Taken:
        """Count ``number`` requests of a key, which may be a fraction, if its limits have room.

        A request that ``computes`` is also refused if the key's tokens of the minute are used up.
        """
        if under_way := [task for task, of in self._counting.items() if of == key]:
            await asyncio.gather(*under_way, return_exceptions=True)
        name = self._name_of(key)
        windows = await self._ask(lambda limiter: _windows(limiter, name, most))
        needed = {"requests": number, "tokens": float(computes)}
        for what, window in windows.items():
            if needed[what] and (wait_s := window.wait_s(needed[what])):
                return Taken(windows, what, wait_s)
        if (requests := windows.get("requests")) is not None:
            item, parts = _item("requests", most["requests"]), round(number * requests.parts)
            if not await self._ask(lambda limiter: limiter.hit(item, name, "requests", cost=parts)):
                return Taken(windows, "requests", AGAIN_S)  # another request took the room
            windows["requests"] = requests.plus(number)
        return Taken(windows)

    def use_tokens(self, key: str, most: int, number: int) -> None:
        """Count used tokens in the background; of more than ``most``, as many as have room."""
        counting = asyncio.create_task(self._use_tokens(key, most, number), name="tokens")
        self._counting[counting] = key
        counting.add_done_callback(self._counting.pop)

    async def _use_tokens(self, key: str, most: int, number: int) -> None:
        name, item = self._name_of(key), _item("tokens", most)

        async def count(limiter: Limiter) -> None:
            if await limiter.hit(item, name, "tokens", cost=number):
                return
            if left := (await limiter.get_window_stats(item, name, "tokens")).remaining:
                await limiter.hit(item, name, "tokens", cost=left)

        await self._ask(count)

    async def _ask(self, call: Callable[[Limiter], Awaitable[T]]) -> T:
        """Call the counts on Redis, or this gateway's own while Redis does not answer."""
        if self._redis is not None and self._is_shared:
            try:
                async with asyncio.timeout(self._wait_s), self._asking:
                    return await self._redis.within(lambda client: call(self._on(client)))
            except TimeoutError:
                self._change(False, "it is too slow for so many requests")
            except (TierUnavailable, ValueError, TypeError) as error:  # the last two: a bad reply
                self._change(False, str(error))
        return await call(self._local)

    def _on(self, client: Any) -> Limiter:
        if self._shared is None or self._shared[0] is not client:
            self._shared = client, Limiter(_OnClient(client))
        return self._shared[1]

    async def run(self) -> None:
        """Check every ``LOOK_S`` whether Redis answers, until cancelled."""
        assert self._redis is not None
        try:
            while True:
                try:
                    (reply,) = await self._redis.run([("GET", SPACE)])
                    self._change(not isinstance(reply, Exception), str(reply))
                except TierUnavailable as error:
                    self._change(False, str(error))
                await asyncio.sleep(LOOK_S)
        finally:
            await self._redis.close()

    def _change(self, is_shared: bool, why: str) -> None:
        if is_shared == self._is_shared:
            return
        self._is_shared = is_shared
        self.on_change(is_shared)
        now = time.monotonic()
        if is_shared:
            log.info("limits of keys hold over all gateways of this Redis together")
        elif now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            log.warning("limits of keys hold for this gateway alone until Redis answers: %s", why)


def _item(what: str, most: int) -> RateLimitItemPerMinute:
    return RateLimitItemPerMinute(most * PARTS[what])


async def _windows(limiter: Limiter, name: str, most: Most) -> dict[str, MinuteUse]:
    storage: Any = limiter.storage

    async def window(what: str) -> MinuteUse:
        item = _item(what, most[what])
        found = await storage.get_sliding_window(item.key_for(name, what), item.get_expiry())
        return MinuteUse(item.amount, PARTS[what], *found)

    found = await asyncio.gather(*map(window, most)) if len(most) > 1 else [await window(*most)]
    return dict(zip(most, found, strict=True))
