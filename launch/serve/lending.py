"""Finds each model's guaranteed part of the machine's memory, and the part that may be lent."""

from __future__ import annotations

from collections.abc import Sequence

from engines.base import Engine
from gateway.models.budget import NOTHING, Budget
from gateway.models.lending import Lending, Part
from launch.settings.effective_settings import EffectiveSettings, EngineSettings
from launch.settings.several_engines import at_once


def lending_of(
    entries: Sequence[EngineSettings], engines: Sequence[Engine], places: int
) -> Lending:
    """Make the object that lends memory between models.

    Args:
        engines: one for each entry.
        places: models on demand that may be loaded at once.
    """
    guaranteed = [_guaranteed(x.effective) for x in entries]
    rows = [x.entry for x in entries]
    all_of_it = Budget(
        at_once(rows, places, [x.hot for x in guaranteed]),
        at_once(rows, places, [x.ram for x in guaranteed]),
    )
    parts = {
        row.name: Part(engine, own, row.share, is_loaded=row.load == "always")
        for row, engine, own in zip(rows, engines, guaranteed, strict=True)
        if not row.url  # an engine that runs elsewhere takes nothing of this machine
    }
    return Lending(all_of_it, parts)


def _guaranteed(effective: EffectiveSettings) -> Budget:
    """Return a model's part of this machine's own memory."""
    if effective.engine_kind == "attached":
        return NOTHING
    settings = effective.settings
    hot = 0 if effective.hot_on_gpu else settings.engine.hot_bytes
    return Budget(hot, settings.store.ram_bytes)
