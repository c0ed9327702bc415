"""Publishes deletions of sessions to all gateways on one Redis, and applies those of others.

A deletion writes a tombstone with the Redis server's time, and sends a message on a channel. A
gateway that receives it removes the session, if that began earlier: from its table at once, and
from its engine as soon as that is ready. A gateway that may have missed messages reads the
tombstones of all its sessions. Before a gateway lists, writes or begins a session that it has not
had, it reads the tombstone. So a save that was under way during the deletion is not served again,
and a session that begins later under the same name is a new one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from engines.base import EngineError, SessionRef, SessionReport
from gateway.keys import Tenants
from gateway.models import ServedModel
from gateway.shared.names import SharedNames, TenantNames
from gateway.shared.redis_client import AsyncRedis, Command
from gateway.shared.session_rows import opened_row, removing
from kvstore.errors import TierUnavailable

log = logging.getLogger("thermocline.sessions")

KEPT_S: Final = 7 * 86_400  # of a tombstone; a server away for longer lists deleted sessions again
MAX_OWED: Final = 10_000  # deletions that wait for Redis, and for engines
AT_ONCE: Final = 200  # sessions whose tombstones are read together
REMOVED_AT_ONCE: Final = 8
NEAR_S: Final = 0.05  # the error of two servers' clocks, within which the deletion wins
STALE_S: Final = 60.0  # an older message may be a replay
AGAIN_S: Final = 2.0
FIRST_LOOK_S: Final = 3.0  # for which an engine's first list waits for tombstones
WAIT_S: Final = 0.1  # for which the first turn of a session waits for its tombstone
ANY: Final = ""  # instead of a model's name: all models


class Tombstone(msgspec.Struct, frozen=True, array_like=True):
    """The times, by model, when sessions of an id were deleted, by the Redis server's clock."""

    at: dict[str, float]

    def of(self, model: str) -> float:
        """Return the time when the session of that model was last deleted; 0.0 if never."""
        return max(self.at.get(model, 0.0), self.at.get(ANY, 0.0))


class Deleted(msgspec.Struct, frozen=True, array_like=True):
    """The message that a tenant's sessions of these ids were deleted, if they began before ``at``.

    ``model``: the model's name, or ``ANY``.
    """

    sender: str
    tenant: str
    model: str
    ids: list[str]
    at: float


class OwnSession(NamedTuple):
    """The key of a session of this gateway; ``model`` is the index of its model."""

    model: int
    tenant: str
    id: str


_tombstones = msgspec.msgpack.Decoder(Tombstone)
_messages = msgspec.msgpack.Decoder(Deleted)


def opened_tombstone(names: TenantNames, id: str, raw: object) -> Tombstone | None:
    """Decode the value of a tombstone's key; None if it is missing or not sealed by our servers."""
    return names.open(names.tombstone(id), raw, _tombstones)


class SharedDeletions:
    """Publishes deletions, and receives those of other servers. Runs on the event loop."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        tenants: Tenants,
        redis: AsyncRedis,
        names: SharedNames,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._tenants = tenants
        self._redis = redis
        self._names = names
        self._clock = clock
        self._sender = secrets.token_hex(8)
        self._unpublished: deque[tuple[Deleted, float]] = deque(maxlen=MAX_OWED)  # by our clock
        self._subscribed = asyncio.Event()  # messages arrive, and all earlier deletions are known
        self._owed: dict[OwnSession, None] = {}  # still to be removed
        self._removing: asyncio.Task[None] | None = None

    @property
    def is_subscribed(self) -> bool:
        """True while this gateway receives all deletions."""
        return self._subscribed.is_set()

    # ---- ours

    async def publish(self, tenant: str, ids: Iterable[str], model: str = ANY) -> bool:
        """Have all gateways remove sessions; return False if that has to wait for Redis.

        A deletion that has to wait is published by ``publish_owed``.
        """
        deleted = Deleted(self._sender, tenant, model, list(ids), 0.0), self._clock()
        try:
            await self._publish(*deleted)
            return True
        except TierUnavailable:
            self._unpublished.append(deleted)
            return False

    async def publish_owed(self) -> None:
        """Publish the deletions that wait for Redis. Raises ``TierUnavailable``."""
        while self._unpublished:
            owed = self._unpublished.popleft()
            try:
                await self._publish(*owed)
            except TierUnavailable:
                self._unpublished.appendleft(owed)
                raise

    async def _publish(self, deleted: Deleted, when: float) -> None:
        """Write tombstones and send a message.

        Raises:
            TierUnavailable: no answer, or Redis refused a tombstone; the message may be sent.
        """
        await self._redis.look_at_clock()
        at = self._redis.server_time(when) or 0.0
        names, model = self._names.of(deleted.tenant), deleted.model
        keys = [names.tombstone(x) for x in deleted.ids]
        before = await self._redis.run([("GET", x) for x in keys])
        commands: list[Command] = []
        for id, key, raw in zip(deleted.ids, keys, before, strict=True):
            known = opened_tombstone(names, id, raw) or Tombstone({})
            # Another server may have deleted it again since, if this one had to wait.
            value = Tombstone({**known.at, model: max(at, known.at.get(model, 0.0))})
            commands.append(("SET", key, names.close(key, value), "EX", KEPT_S))
            for each in [model] if model else [x.label for x in self._models if x.label]:
                commands += removing(names, each, id)
        replies = await self._redis.run(commands)
        message = msgspec.structs.replace(deleted, at=at)
        await self._redis.publish(
            self._names.channel, self._names.close(self._names.channel, message)
        )
        for command, reply in zip(commands, replies, strict=True):
            if command[0] == "SET" and isinstance(reply, Exception):  # its memory may be full
                raise TierUnavailable(f"redis: {type(reply).__name__}")

    # ---- others'

    async def run(self) -> None:
        """Receive deletions until cancelled."""
        while True:
            try:
                async with self._redis.subscribed(self._names.channel) as messages:
                    await self._redis.look_at_clock()
                    with suppress(TierUnavailable):  # a refusal must not end the subscription
                        await self.publish_owed()
                    await self._look_at_all()
                    self._subscribed.set()
                    async for raw in messages:
                        await self._redis.look_at_clock()  # notices if it has jumped
                        if (late := self.receive(raw)) is not None:
                            await self._look_at(late)
            except TierUnavailable as error:
                if self._subscribed.is_set():
                    log.warning("deletions at other servers are not received: %s", error)
            finally:
                self._subscribed.clear()
            await asyncio.sleep(1.0)

    def receive(self, raw: bytes) -> Deleted | None:
        """Apply a message; ignore our own, and those that our secret did not seal.

        Returns an old message, which is not applied: it is a replay, or this server was suspended.
        """
        message = self._names.open(self._names.channel, raw, _messages)
        now = self._redis.now() or 0.0
        if message is None or message.sender == self._sender:
            return None
        if now - message.at > STALE_S:
            return message
        for number, model in enumerate(self._models):
            if message.model in (ANY, model.label):
                for id in message.ids:
                    key = OwnSession(number, message.tenant, id)
                    began = self.began(key)
                    if began is not None and began < message.at + NEAR_S:
                        self.remove(key)
        return None

    async def _look_at(self, message: Deleted) -> None:
        """Read the tombstones of an old message's sessions that are known here."""
        for number, model in enumerate(self._models):
            known = [x for x in message.ids if model.sessions.table.row(message.tenant, x)]
            for id in await self._deleted(number, message.tenant, known):
                self.remove(OwnSession(number, message.tenant, id))

    def began(self, key: OwnSession) -> float | None:
        """Return when a session began, by the Redis server's clock.

        -inf if it is from before the gateway's start; None if it is not known here.
        """
        began = self._models[key.model].sessions.began(key.tenant, key.id)
        return None if began is None else self._redis.server_time(began)

    async def _look_at_all(self) -> None:
        """Read the tombstones of all sessions here, since messages may have been missed."""
        for number, model in enumerate(self._models):
            by_tenant: dict[str, list[str]] = {}
            for session in model.sessions.table:
                by_tenant.setdefault(session.ref.tenant, []).append(session.ref.id)
            for tenant, ids in by_tenant.items():
                for id in await self._deleted(number, tenant, ids):
                    self.remove(OwnSession(number, tenant, id))

    async def _deleted(self, model: int, tenant: str, ids: Sequence[str]) -> list[str]:
        """Return the ids of those sessions that were deleted after they began."""
        names, label = self._names.of(tenant), self._models[model].label
        found: list[str] = []
        for i in range(0, len(ids), AT_ONCE):
            some = ids[i : i + AT_ONCE]
            (values,) = await self._redis.run([("MGET", *(names.tombstone(x) for x in some))])
            if isinstance(values, Exception):
                raise TierUnavailable(f"redis: {type(values).__name__}")
            for id, raw in zip(some, values, strict=True):
                tombstone = opened_tombstone(names, id, raw)
                at = tombstone.of(label) if tombstone is not None else 0.0
                if at and not await self._is_new(OwnSession(model, tenant, id), at):
                    found.append(id)
        return found

    async def _is_new(self, key: OwnSession, at: float) -> bool:
        """Return whether a session began after its deletion at ``at``, here or elsewhere."""
        began = self.began(key)
        if began is not None and began >= at:
            return True
        names = self._names.of(key.tenant)
        name = names.row(names.mark(self._models[key.model].label, key.id))
        (raw,) = await self._redis.run([("GET", name)])
        row = opened_row(names, name, raw)
        return row is not None and row.began >= at

    async def among(self, model: int, reports: Iterable[SessionReport]) -> list[SessionReport]:
        """Return the reported sessions that were deleted. See ``scheduler.follower.Deleted``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                await self._subscribed.wait()
        by_tenant: dict[str, dict[str, SessionReport]] = {}
        for report in reports:
            by_tenant.setdefault(report.tenant, {})[report.id] = report
        found: list[SessionReport] = []
        with suppress(TierUnavailable):  # ``run`` checks all sessions when Redis is back
            for tenant, each in by_tenant.items():
                found += [each[x] for x in await self._deleted(model, tenant, list(each))]
        return found

    async def before_first_turn(self, model: ServedModel, session: SessionRef) -> None:
        """Have the engine forget a session again if it was deleted.

        Called before the first turn of a session that this gateway does not know: a save that was
        under way may have reached Redis after the deletion.
        """
        number = self._models.index(model)
        with suppress(TierUnavailable, TimeoutError, EngineError):
            async with asyncio.timeout(WAIT_S):
                is_deleted = await self._deleted(number, session.tenant, [session.id])
            if is_deleted:
                await model.sessions.forget_deleted(session)

    # ---- removals

    def remove(self, key: OwnSession) -> None:
        """Remove a session that was deleted elsewhere; retry while its engine is not ready."""
        if len(self._owed) < MAX_OWED:
            self._owed[key] = None
        if self._removing is None or self._removing.done():
            self._removing = asyncio.create_task(self._remove_all(), name="session-removals")

    async def removed(self) -> None:
        """Wait until all sessions that ``remove`` was called for are removed."""
        if self._removing is not None:
            await self._removing

    async def _remove_all(self) -> None:
        while self._owed:
            keys = list(self._owed)
            for i in range(0, len(keys), REMOVED_AT_ONCE):
                await asyncio.gather(*(self._remove(x) for x in keys[i : i + REMOVED_AT_ONCE]))
            if self._owed:
                await asyncio.sleep(AGAIN_S)

    async def _remove(self, key: OwnSession) -> None:
        model = self._models[key.model]
        ref = SessionRef(key.tenant, key.id, self._tenants.salt_of(key.tenant))
        try:
            await model.sessions.forget_deleted(ref)
        except EngineError as error:
            if model.is_there:
                log.warning("a session that was deleted is still to be removed: %s", error)
                return
        except Exception:  # the edge of a task, which must go on with other sessions
            log.exception("a session that was deleted is still to be removed")
            return
        model.prefixes.forget(key.tenant, key.id)
        self._owed.pop(key, None)  # a model that is not loaded drops the session at its next load
