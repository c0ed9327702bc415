"""The rows of a tenant's sessions on a Redis, read page by page, the latest used first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from gateway.shared.names import SharedNames, TenantNames
from gateway.shared.redis_client import AsyncRedis, Command
from kvstore.errors import TierUnavailable
from kvstore.session import TierName

KEPT_S: Final = 7 * 86_400  # for which a row is kept after its session's last turn
MAX_MODELS: Final = 100  # whose names are read
MICROS: Final = 1_000_000  # scores are in microseconds


class SessionRow(msgspec.Struct, frozen=True, array_like=True):
    """One session. ``began`` and ``used``: seconds of the Redis server's clock."""

    model: str
    id: str
    began: float
    used: float
    tier: TierName | None
    tokens: int
    nbytes: int
    title: str = ""

    @property
    def score(self) -> int:
        """Its score in the index: the time of last use in microseconds."""
        return int(self.used * MICROS)


class RowPage(NamedTuple):
    """A page of the list. ``next``: the ``below`` of the next page; None: this is the last."""

    rows: Sequence[SessionRow]
    next: int | None


_decoder = msgspec.msgpack.Decoder(SessionRow)


def opened_row(names: TenantNames, key: str, raw: object) -> SessionRow | None:
    """Decode the value of a row's key; None if it is missing or not sealed by our servers."""
    return names.open(key, raw, _decoder)


def writing(names: TenantNames, row: SessionRow) -> list[Command]:
    """Return the commands that write a row."""
    mark = names.mark(row.model, row.id)
    key = names.row(mark)
    return [
        ("SET", key, names.close(key, row), "EX", KEPT_S),
        ("ZADD", names.index, row.score, mark),
        ("ZREMRANGEBYSCORE", names.index, "-inf", row.score - KEPT_S * MICROS),
        ("EXPIRE", names.index, KEPT_S),
    ]


def removing(names: TenantNames, model: str, session_id: str) -> list[Command]:
    """Return the commands that remove a row."""
    mark = names.mark(model, session_id)
    return [("ZREM", names.index, mark), ("UNLINK", names.row(mark))]


class SharedSessionRows:
    """Reads rows. Every method may raise ``TierUnavailable``."""

    def __init__(self, redis: AsyncRedis, names: SharedNames) -> None:
        self._redis = redis
        self._names = names

    async def page(self, tenant: str, most: int, below: int | None = None) -> RowPage:
        """Read the next ``most`` rows; the cost does not depend on how many rows there are.

        Args:
            below: read only rows with a lower score: a page's ``next``; None = the first page.
        """
        names = self._names.of(tenant)
        start = "+inf" if below is None else f"({below}"
        asked = ("ZREVRANGEBYSCORE", names.index, start, "-inf", "WITHSCORES")
        (found,) = await self._redis.run([(*asked, "LIMIT", 0, most + 1)])
        pairs = _pairs(found)
        shown = pairs[:most]
        if not shown:
            return RowPage([], pairs[0][1] + 1 if pairs else None)
        keys = [names.row(mark) for mark, _ in shown]
        (values,) = await self._redis.run([("MGET", *keys)])
        if isinstance(values, Exception):
            raise TierUnavailable(f"redis: {type(values).__name__}")
        gone = [x for (x, _), value in zip(shown, values, strict=True) if value is None]
        if gone:  # expired, or evicted by the server
            await self._redis.run([("ZREM", names.index, *gone)])
        rows = [opened_row(names, key, raw) for key, raw in zip(keys, values, strict=True)]
        return RowPage(
            [x for x in rows if x is not None], shown[-1][1] if len(pairs) > most else None
        )

    async def number(self, tenant: str) -> int:
        """Count a tenant's rows."""
        (found,) = await self._redis.run([("ZCARD", self._names.of(tenant).index)])
        if not isinstance(found, int):
            raise TierUnavailable(f"redis: {type(found).__name__}")
        return found

    async def of_session(self, tenant: str, id: str, models: Collection[str]) -> list[SessionRow]:
        """Read the rows of a session id, one for each model, the latest used first.

        Args:
            models: names of models; empty = all models of all servers.
        """
        names = self._names.of(tenant)
        if not models:
            (found,) = await self._redis.run([("SRANDMEMBER", self._names.models, MAX_MODELS)])
            if isinstance(found, Exception):
                raise TierUnavailable(f"redis: {type(found).__name__}")
            models = [x.decode(errors="replace") for x in found]
        keys = [names.row(names.mark(x, id)) for x in models]
        values = await self._redis.run([("GET", x) for x in keys])
        rows = [opened_row(names, key, raw) for key, raw in zip(keys, values, strict=True)]
        return sorted((x for x in rows if x is not None), key=lambda x: -x.used)

    async def remove(self, tenant: str, rows: Sequence[SessionRow]) -> None:
        """Remove rows."""
        names = self._names.of(tenant)
        await self._redis.run([y for x in rows for y in removing(names, x.model, x.id)])


def _pairs(reply: object) -> list[tuple[str, int]]:
    """Parse marks with their scores; RESP3 sends pairs, RESP2 one flat list."""
    if not isinstance(reply, list):
        raise TierUnavailable(f"redis: {type(reply).__name__}")
    if reply and isinstance(reply[0], bytes):
        reply = list(zip(reply[::2], reply[1::2], strict=True))
    return [(_text(mark), int(float(score))) for mark, score in reply]


def _text(mark: bytes) -> str:
    return mark.decode(errors="replace")
