"""Saves all sessions of a replica to the tier that all replicas share, before it ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from engines.base import Engine, EngineError, SessionRef, SessionReport

log = logging.getLogger("thermocline.ray")

AT_ONCE: Final = 8
POLL_S: Final = 0.2


async def save_all(engine: Engine, within_s: float) -> int:
    """Have every session packed and moved to Redis; returns how many are there.

    What is not saved in time costs a prefill.
    """
    try:
        async with asyncio.timeout(within_s):
            while (await engine.stats()).save_queue_bytes:
                await asyncio.sleep(POLL_S)
            reports = await engine.sessions()
            places = asyncio.Semaphore(AT_ONCE)
            return sum(await asyncio.gather(*(_saved(engine, x, places) for x in reports)))
    except (EngineError, TimeoutError) as error:
        log.warning("not all sessions were saved: %s", error or "no time was left")
        return 0


async def _saved(engine: Engine, session: SessionReport, places: asyncio.Semaphore) -> bool:
    async with places:
        try:
            reference = SessionRef(session.tenant, session.id, b"")
            done = await engine.demote(reference, "redis")
        except EngineError as error:
            log.warning("session %s was not saved: %s", session.id, error)
            return False
        return done.report is not None and done.report.tier == "redis"
