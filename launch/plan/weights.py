"""The weights of a model, and whether they fit into the memory where they have to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from launch.errors import UsageError
from launch.families.weights import estimated_weights
from launch.model.find import Model, find_model
from launch.settings.budgets import weights_bytes
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.units import show_bytes

INDEX: Final = "model.safetensors.index.json"
_OURS: Final = ("mlx", "vllm")  # engines whose weights are in this machine's memory


def known_weights(model: Model) -> int | None:
    """Bytes of a model's weights, from its files or from the index that stands for them."""
    if model.folder is None:
        return None
    if found := weights_bytes(model.folder, widened=False):
        return found
    return _indexed(model.folder / INDEX)


def _indexed(file: Path) -> int | None:
    try:
        total = json.loads(file.read_text("utf-8"))["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(total) if isinstance(total, int | float) and total > 0 else None


def too_large(weights: int, room: int) -> str:
    """The reason why weights of so many bytes have no place in ``room``; "" if they have."""
    if weights < room:
        return ""
    return f"does not fit: {show_bytes(weights)} of weights, {show_bytes(room)} here"


def too_large_here(effective: EffectiveSettings) -> str:
    """The reason why the model of these settings cannot be loaded here; "" if it can.

    Its weights are counted as they are stored; an engine that widens them needs more.
    """
    if effective.engine_kind not in _OURS or effective.assumes_gpu:
        return ""
    if effective.planned_weights is not None:
        return too_large(effective.planned_weights, effective.room)
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    weights = known_weights(model) or estimated_weights(model.config()) or 0
    return too_large(weights, effective.room)


def weights_at(effective: EffectiveSettings, bits: float) -> int:
    """Bytes of the model's weights, if they were quantised to so many bits.

    Raises ``UsageError``: they are quantised already, or cannot be counted.
    """
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    content = model.config()
    if any(isinstance(content.get(x), dict) for x in ("quantization", "quantization_config")):
        raise UsageError(f"{model.name} is quantised, as its config.json says: leave --bits out")
    found = estimated_weights({**content, "quantization": {"bits": bits}})
    if found is None:
        raise UsageError(
            f"the weights of {model.name} cannot be counted from its config.json: give their bytes,"
            " for instance --weights 18GiB"
        )
    return found
