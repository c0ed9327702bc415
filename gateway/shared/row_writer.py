"""Writes the rows of this gateway's sessions to Redis, some at once, beside all requests."""

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
    """Notes which sessions of a model have changed, while no turn of them runs."""

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
    """Keeps the rows of sessions that were used here last. Runs on the event loop."""

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
        self._changed: dict[OwnSession, float] = {}  # with the last use, by our own clock
        self._said: set[str] = set()  # models whose names are there
        for number, model in enumerate(models):
            model.sessions.observe(_Changes(number, self))

    def note(self, key: OwnSession) -> None:
        """Have the row of a session written, or removed if it is gone, in the next round."""
        session = self._models[key.model].sessions.table.row(key.tenant, key.id)
        if session is None or session.is_task:  # a task is no conversation, to be found elsewhere
            return
        self._changed.pop(key, None)
        if len(self._changed) >= MAX_CHANGED:
            del self._changed[next(iter(self._changed))]
        self._changed[key] = session.last_used

    def leave(self, key: OwnSession) -> None:
        """Leave the row of a session as it is: its engine lost it, and Redis may have a copy."""
        self._changed.pop(key, None)

    def note_if_begun(self, key: OwnSession) -> None:
        """Do as ``note`` does if the session's first turn was here: engines list others, too."""
        session = self._models[key.model].sessions.table.row(key.tenant, key.id)
        if session is None or not session.known or session.state.value not in QUIET:
            return
        if session.began > float("-inf"):
            self.note(key)

    async def round(self) -> bool:
        """Write some changed rows; True if more are left. Raises ``TierUnavailable``."""
        await self._say_models()
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

    async def _say_models(self) -> None:
        """Say which models have rows; if Redis has forgotten it, it has no rows of ours either."""
        labels = {x.label for x in self._models} - {""}
        if not labels:
            return
        added, _ = await self._redis.run(
            [("SADD", self._names.models, *labels), ("EXPIRE", self._names.models, KEPT_S)]
        )
        if added == len(labels) and labels <= self._said:
            log.info("Redis was emptied: the rows of all sessions are written again")
            for number, model in enumerate(self._models):
                for session in model.sessions.table:
                    self.note_if_begun(OwnSession(number, session.ref.tenant, session.ref.id))
        self._said |= labels

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
        """Return the row as it is to be; None if the session is gone.

        ``known``: the row that is there. An earlier life of this server may have written it.
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
    """Return whether a row would be written as it is already."""
    shown = (row.tier, row.tokens, row.nbytes, row.title, row.score)
    return shown == (known.tier, known.tokens, known.nbytes, known.title, known.score)
