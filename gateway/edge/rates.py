"""Counts what keys use in a minute, by the library ``limits``.

The window slides: the previous minute counts by the part of it that lies within the last 60 s.
Gateways that share a Redis share its count. While it does not answer, each gateway counts for
itself, and no request fails for it; the log and a metric say so.
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
# The library counts whole numbers, and a read costs a part of a request.
PARTS: Final[Mapping[str, int]] = {"requests": 100, "tokens": 1}
SPACE: Final = "thermocline:rates"
MAX_ASKING: Final = 8  # calls at once: each has a connection to Redis
WAIT_S: Final = 1.0  # for one of these and its answer
LOOK_S: Final = 0.5  # between two looks at whether Redis answers
SAY_EVERY_S: Final = 60.0  # that it does not
AGAIN_S: Final = 1.0

log = logging.getLogger("thermocline.limits")
T = TypeVar("T")
Most: TypeAlias = Mapping[str, int]  # "requests" and "tokens" that a key may use in a minute


class MinuteUse(NamedTuple):
    """A key's use of one limit in the previous and the current minute, in units of 1 / ``parts``.

    ``previous_s`` and ``current_s``: seconds for which each still counts.
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
        """The number that may be used now, in whole requests or tokens."""
        return max(0, self.most - self.used) // self.parts

    @property
    def reset_s(self) -> float:
        """Seconds until nothing of it counts any more."""
        return self.current_s if self.current else self.previous_s if self.previous else 0.0

    def wait_s(self, number: float) -> float:
        """Return the seconds until ``number`` more may be used; 0 if it may be now."""
        room = self.most - min(self.most, round(number * self.parts))
        if self.used <= room:
            return 0.0
        # Counts are rounded down, so that there is room just before a whole unit more is gone.
        if self.current <= room:  # when so much less of the minute before counts
            return self.previous_s - (room - self.current + 1) * MINUTE_S / self.previous
        return self.current_s - (room + 1) * MINUTE_S / self.current  # when that is the one before

    def plus(self, number: float) -> MinuteUse:
        """Return it with so much more used."""
        more = self.current + round(number * self.parts)
        return self._replace(current=more, current_s=self.current_s or 2 * MINUTE_S)


class Taken(NamedTuple):
    """A key's windows after a request was counted; ``refused``: the limit that had no room."""

    windows: Mapping[str, MinuteUse] = {}
    refused: str = ""
    wait_s: float = 0.0


class RunsOnRedis(Protocol):
    """A client of a Redis; see ``gateway.shared.redis_client``. Raises ``TierUnavailable``."""

    async def run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]: ...

    async def within(self, call: Callable[[Any], Awaitable[T]]) -> T: ...

    async def close(self) -> None: ...


class _OnClient(RedisStorage):
    """The library's counts by our client, whose URLs name Sentinels and clusters, too."""

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
            redis: owned by this object; None: this gateway is the only one.
            name_of: makes a name for a key that reveals nothing of it to others.
            on_change: called with True when Redis begins to count, with False when it ends to.
            wait_s: that a call may take, in line for a connection included.
        """
        self._redis = redis
        self._name_of = name_of
        self.on_change = on_change
        self._wait_s = wait_s
        self._local = Limiter(MemoryStorage())
        self._shared: tuple[Any, Limiter] | None = None  # with the client that it is on
        self._asking = asyncio.Semaphore(MAX_ASKING)
        self._counting: dict[asyncio.Task[None], str] = {}  # tokens, by key
        self._is_shared: bool | None = None  # None: not known yet
        self._said_at = float("-inf")

    @property
    def on_redis(self) -> bool:
        """True if ``run`` is needed."""
        return self._redis is not None

    @property
    def trouble(self) -> bool:
        """True while the count should be that of all gateways, and is not."""
        return self.on_redis and not self._is_shared

    async def take(self, key: str, most: Most, number: float, computes: bool) -> Taken:
        """Count a request of a key, or a part of one, if there is room for it.

        One that ``computes`` has to wait while the key owes tokens.
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
                return Taken(windows, "requests", AGAIN_S)  # another one was quicker
            windows["requests"] = requests.plus(number)
        return Taken(windows)

    def use_tokens(self, key: str, most: int, number: int) -> None:
        """Count tokens that were used; at most a full minute's worth, which is ``most``."""
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
        """Ask the count of all gateways, or this one's where that does not answer."""
        if self._redis is not None and self._is_shared:
            try:
                async with asyncio.timeout(self._wait_s), self._asking:
                    return await self._redis.within(lambda client: call(self._on(client)))
            except TimeoutError:
                self._change(False, "it is too slow for so many requests")
            except (TierUnavailable, ValueError, TypeError) as error:  # or no answer of a count
                self._change(False, str(error))
        return await call(self._local)

    def _on(self, client: Any) -> Limiter:
        if self._shared is None or self._shared[0] is not client:
            self._shared = client, Limiter(_OnClient(client))
        return self._shared[1]

    async def run(self) -> None:
        """Look whether Redis answers, again and again, until cancelled."""
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
            log.info("keys' limits hold over all gateways of this Redis together")
        elif now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            log.warning("keys' limits hold at this gateway alone, until Redis answers: %s", why)


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
