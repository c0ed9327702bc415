"""Writes the rows of this gateway's sessions to Redis, in batches, in the background."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from engines.base import SessionRef
from gateway.models import ServedModel
from gateway.shared.deletions import NEAR_S, OwnSession, SharedDeletions, opened_tombstone
from gateway.shared.names import SharedNames
from gateway.shared.redis_client import AsyncRedis, Command
from gateway.shared.session_rows import KEPT_S, SessionRow, opened_row, removing, writing
from kvstore.errors import TierUnavailable
from kvstore.session import TIERS
from scheduler.session import Observer, Step

log = logging.getLogger("thermocline.sessions")

AT_ONCE: Final = 100  # rows of one round
MAX_CHANGED: Final = 100_000  # rows that wait for Redis; the oldest is dropped first
QUIET: Final = ("idle", "cold")


class _Changes(Observer):
    """Observes a model's sessions, and notes the changed ones while no turn of them runs."""

    def __init__(self, number: int, writer: RowWriter) -> None:
        self._number = number
        self._writer = writer

    def transition(self, ref: SessionRef, step: Step) -> None:
        key = OwnSession(self._number, ref.tenant, ref.id)
        if step.why == "missing" and step.left in TIERS:
            self._writer.leave(key)
        elif step.after in (*QUIET, "gone"):
            self._writer.note(key)

    def row_changed(self, ref: SessionRef) -> None:
        self._writer.note_if_begun(OwnSession(self._number, ref.tenant, ref.id))


class RowWriter:
    """Writes the rows of the sessions that this gateway used last. Runs on the event loop."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        redis: AsyncRedis,
        names: SharedNames,
        deletions: SharedDeletions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._redis = redis
        self._names = names
        self._deletions = deletions
        self._clock = clock
        self._changed: dict[OwnSession, float] = {}  # -> time of last use, by our own clock
        self._published: set[str] = set()  # models whose names were written
        for number, model in enumerate(models):
            model.sessions.observe(_Changes(number, self))

    def note(self, key: OwnSession) -> None:
        """Write the row of a session, or remove it if the session is gone, in the next round."""
        session = self._models[key.model].sessions.table.row(key.tenant, key.id)
        if session is None or session.is_task:  # tasks are not listed at other servers
            return
        self._changed.pop(key, None)
        if len(self._changed) >= MAX_CHANGED:
            del self._changed[next(iter(self._changed))]
        self._changed[key] = session.last_used

    def leave(self, key: OwnSession) -> None:
        """Keep the row of a session that the engine lost, since Redis may still have a copy."""
        self._changed.pop(key, None)

    def note_if_begun(self, key: OwnSession) -> None:
        """Do as ``note`` does, but only if the session had a turn at this gateway.

        An engine also lists sessions that it has from elsewhere.
        """
        session = self._models[key.model].sessions.table.row(key.tenant, key.id)
        if session is None or not session.known or session.state.value not in QUIET:
            return
        if session.began > float("-inf"):
            self.note(key)

    async def round(self) -> bool:
        """Write some changed rows; return True if more are left. Raises ``TierUnavailable``."""
        await self._publish_models()
        if not self._changed:
            return False
        await self._redis.look_at_clock()
        some = {x: self._changed.pop(x) for x in list(self._changed)[:AT_ONCE]}
        by_tenant = defaultdict[str, list[OwnSession]](list)
        for key in some:
            by_tenant[key.tenant].append(key)
        try:
            for tenant, keys in by_tenant.items():
                await self._write(tenant, keys, some)
        except TierUnavailable:
            self._changed = some | self._changed
            raise
        return bool(self._changed)

    async def _publish_models(self) -> None:
        """Write the names of our models to Redis.

        If none of them was there any more, Redis was emptied: note all sessions again.
        """
        labels = {x.label for x in self._models} - {""}
        if not labels:
            return
        added, _ = await self._redis.run(
            [("SADD", self._names.models, *labels), ("EXPIRE", self._names.models, KEPT_S)]
        )
        if added == len(labels) and labels <= self._published:
            log.info("Redis was emptied: the rows of all sessions are written again")
            for number, model in enumerate(self._models):
                for session in model.sessions.table:
                    self.note_if_begun(OwnSession(number, session.ref.tenant, session.ref.id))
        self._published |= labels

    async def _write(
        self, tenant: str, keys: Sequence[OwnSession], used: dict[OwnSession, float]
    ) -> None:
        names = self._names.of(tenant)
        labels = [self._models[x.model].label for x in keys]
        rows = [names.row(names.mark(label, x.id)) for label, x in zip(labels, keys, strict=True)]
        tombstones = [names.tombstone(x.id) for x in keys]
        asked = [("MGET", *rows), ("MGET", *tombstones)]
        there, deleted = await self._redis.run(asked)
        if isinstance(there, Exception) or isinstance(deleted, Exception):
            raise TierUnavailable("redis: rows cannot be read")
        commands: list[Command] = []
        for key, label, name, raw, tomb in zip(keys, labels, rows, there, deleted, strict=True):
            known = opened_row(names, name, raw)
            row = self._row(key, label, used[key], known)
            tombstone = opened_tombstone(names, key.id, tomb)
            if row is not None and tombstone is not None and row.began < tombstone.of(label):
                self._deletions.remove(key)
            elif row is None:
                if known is not None and not self._is_later(known, used[key]):
                    commands += removing(names, label, key.id)
            elif known is None or not (self._is_later(known, used[key]) or is_same(known, row)):
                commands += writing(names, row)
        await self._redis.run(commands)

    def _is_later(self, row: SessionRow, used: float) -> bool:
        """Return whether another server used the session after this one did."""
        return row.used > (self._redis.server_time(used) or 0.0) + NEAR_S

    def _row(
        self, key: OwnSession, label: str, used: float, known: SessionRow | None
    ) -> SessionRow | None:
        """Return the row to write; None if the session is gone.

        ``known``: the present row, perhaps from before this server's restart.
        """
        model = self._models[key.model]
        session = model.sessions.table.row(key.tenant, key.id)
        if session is None or not session.known or not label:
            return None
        began = max(self._deletions.began(key) or 0.0, known.began if known else 0.0)
        return SessionRow(
            model=label,
            id=key.id,
            began=began,
            used=self._redis.server_time(used) or 0.0,
            tier=session.tier,
            tokens=session.tokens,
            nbytes=session.cold_bytes or session.hot_bytes,
            title=model.live.title(key.tenant, key.id),
        )


def is_same(known: SessionRow, row: SessionRow) -> bool:
    """Return whether two rows of a session have the same content, apart from ``began``."""
    shown = (row.tier, row.tokens, row.nbytes, row.title, row.score)
    return shown == (known.tier, known.tokens, known.nbytes, known.title, known.score)
