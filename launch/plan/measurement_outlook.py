"""Says whether a model that was not measured yet will be, by the code that ``serve`` asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engines.calibration.gate.choice import Choice
from launch.calibrate.background_run import MOST_S
from launch.calibrate.first_calibration import order_beside
from launch.errors import LaunchError
from launch.machine.memory import available_memory
from launch.model import find_model
from launch.settings.default_budgets import weights_bytes
from launch.settings.effective_settings import EffectiveSettings

BY_HAND = "run: thermocline calibrate"


class Outlook(NamedTuple):
    """The answer: will the first start measure the model, and what, or why not."""

    will_be: bool
    text: str


def in_words(choice: Choice) -> str:
    """The codec, and why it is this one."""
    size = ", exact but large" if choice.unmeasured else ""
    return f"{choice.name}{size} ({choice.why})"


def first_measurement(
    effective: EffectiveSettings, available: Callable[[], int] = available_memory
) -> Outlook:
    """Say what a model's first start will measure beside the service.

    Args:
        available: bytes of memory that the machine can give now, before it serves.
    """
    if not effective.settings.store.calibrate:
        return Outlook(False, BY_HAND)
    try:
        order = order_beside(effective, lambda: available() - served_bytes(effective))
    except LaunchError as error:
        return Outlook(False, f"it will not be measured beside the service: {error}; {BY_HAND}")
    presets, hours = ", ".join(order.presets), f"{MOST_S / 3600:.0f} hours at most"
    return Outlook(True, f"the first start measures it beside the service ({presets}; {hours})")


def served_bytes(effective: EffectiveSettings) -> int:
    """Bytes of this machine's own memory that the service itself will take."""
    settings = effective.settings
    if effective.hot_on_gpu:
        return settings.store.ram_bytes
    model = find_model(settings.engine.model, effective.folders.cache)
    weights = weights_bytes(Path(model.path), effective.widens) or 0
    return weights + settings.engine.hot_bytes + settings.store.ram_bytes
