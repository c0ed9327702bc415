"""Carries out the verbs of the sessions API on this server's sessions, also for other servers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from engines.base import SessionRef, TierName
from gateway.directory.orders import Result
from gateway.errors import FORESEEN, failure_of
from gateway.keys import Tenants
from gateway.models.loading import Loading
from gateway.models.served_model import ServedModel
from kvstore.directory.boards import Order
from scheduler.view import SessionView

log = logging.getLogger("thermocline.directory")

MAX_WORDS: Final = 400  # of an error


class Verbs:
    """The verbs that other servers ask for, on all models of this server."""

    def __init__(
        self, models: Sequence[ServedModel], tenants: Tenants, loading: Loading | None
    ) -> None:
        self._models = models
        self._tenants = tenants
        self._loading = loading

    async def carry_out(self, order: Order, server: str) -> Result:
        """Do what another server asked for, and answer as to a client."""
        ref = SessionRef(order.tenant, order.id, self._tenants.salt_of(order.tenant))
        model = next((x for x in self._models if x.label == order.model), None)
        try:
            view = None
            if model is not None:
                async with self._using(model, order):
                    view = await done(model, ref, order.verb, order.tier)
        except Exception as error:  # the edge of a task: the other server gets an answer
            if not isinstance(error, FORESEEN):
                log.exception("a verb of another server failed")
            failure = failure_of(error)
            failure = msgspec.structs.replace(failure, message=failure.message[:MAX_WORDS])
            return Result(failure.status, failure.json())
        if view is None or model is None:
            return Result(404, b"")
        return Result(200, msgspec.json.encode({**shown(model, view), "server": server}))

    @asynccontextmanager
    async def _using(self, model: ServedModel, order: Order) -> AsyncIterator[None]:
        """Have a model loaded inside the context, if the verb needs its engine."""
        if model.on_demand is None or self._loading is None or sleeps(model, order.verb):
            yield
            return
        await self._loading.enter(model.on_demand, order.tenant)
        try:
            yield
        finally:
            self._loading.leave(model.on_demand)


def sleeps(model: ServedModel, verb: str) -> bool:
    """Say whether the model's sessions sleep already, as deep as the verb could have them."""
    return verb == "demote" and model.state == "unloaded"


async def done(
    model: ServedModel, session: SessionRef, verb: str, tier: TierName | None = None
) -> SessionView | None:
    """Carry out a verb on a loaded model; returns None if the session is not known.

    Raises ``SessionKept``, ``Overloaded``, ``MemoryScarce``, ``EngineError``.
    """
    if sleeps(model, verb):
        return model.sessions.get(session)
    match verb:
        case "demote":
            return await model.sessions.demote(session, tier)
        case "prefetch":
            return await model.sessions.prefetch(session)
        case "pin" | "unpin":
            return await model.sessions.pin(session, verb == "pin")
        case _:
            return None


def shown(model: ServedModel, view: SessionView) -> dict[str, Any]:
    """Show a session of this server."""
    return {**msgspec.to_builtins(view), "model": model.label}
