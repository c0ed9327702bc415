"""Removes sessions of this server that were deleted at another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from engines.base import EngineError, SessionRef
from gateway.directory.own_rows import OwnKey, OwnRows
from gateway.keys import Tenants
from gateway.models.served_model import ServedModel

log = logging.getLogger("thermocline.directory")

AT_ONCE: Final = 8
AGAIN_S: Final = 2.0


class Removals:
    """The sessions that are still to be removed; an engine that is away is asked again."""

    def __init__(self, models: Sequence[ServedModel], tenants: Tenants, own: OwnRows) -> None:
        self._models = models
        self._tenants = tenants
        self._own = own
        self._owed: dict[OwnKey, int] = {}  # with the epoch of the deletion
        self._removing: asyncio.Task[None] | None = None

    def begin(self, keys: Iterable[OwnKey], epoch: int) -> None:
        """Begin to remove sessions, for a deletion of that epoch."""
        for key in list(keys):
            self._own.drop(key)
            self._owed[key] = epoch
        if self._owed and (self._removing is None or self._removing.done()):
            self._removing = asyncio.create_task(self._remove_all(), name="directory-removals")

    async def done(self) -> None:
        """Wait until all is removed."""
        if self._removing is not None:
            await self._removing

    async def _remove_all(self) -> None:
        while self._owed:
            keys = list(self._owed)
            for i in range(0, len(keys), AT_ONCE):
                await asyncio.gather(*(self._remove(x) for x in keys[i : i + AT_ONCE]))
            if self._owed:
                await asyncio.sleep(AGAIN_S)

    async def _remove(self, key: OwnKey) -> None:
        epoch, row = self._owed[key], self._own.row(key)
        model = next((x for x in self._models if x.label == key.model), None)
        if model is None:
            return  # its engine will say its name
        if row is not None and row.epoch >= epoch:  # a session that began since
            del self._owed[key]
            return
        ref = SessionRef(key.tenant, key.id, self._tenants.salt_of(key.tenant))
        try:
            await model.sessions.forget_deleted(ref)
        except EngineError as error:
            if model.is_there:
                log.warning("a session that was deleted is still to be removed: %s", error)
                return
        except Exception:  # the edge of a task: other sessions are to be removed all the same
            log.exception("a session that was deleted is still to be removed")
            return
        model.prefixes.forget(key.tenant, key.id)
        self._owed.pop(key, None)  # a model that is not loaded forgets it when it is
