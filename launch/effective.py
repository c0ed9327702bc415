"""The settings that will really be used here: sources laid together, the machine looked at."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.config import EngineConfig
from launch.budgets import budgets, weights_bytes
from launch.errors import LaunchError
from launch.fields import Value
from launch.machine import available_memory, free_disk
from launch.paths import Folders, folders
from launch.sample_model import WEIGHTS_BYTES
from launch.settings import Resolved, Settings, resolve
from launch.sources import Layer

INSTALL_MLX = "pip install 'thermocline[mlx]' (or bash launch/install.sh in a checkout)"


@dataclass(frozen=True)
class Effective:
    resolved: Resolved
    folders: Folders
    engine_kind: str  # a name in engines.registry, or module:Attr; never "auto"

    @property
    def settings(self) -> Settings:
        return self.resolved.settings


def effective(layers: Sequence[Layer], environ: Mapping[str, str]) -> Effective:
    """Resolve ``layers``; budgets that nobody set are fitted to this machine.

    Raises:
        UsageError: a setting is wrong.
    """
    chosen = resolve(layers).settings
    where = folders(chosen.data_dir, chosen.cache_dir, environ)
    kind = engine_kind(chosen.engine)
    fitted: Layer = {
        "data_dir": Value(str(where.data), "this system"),
        "cache_dir": Value(str(where.cache), "this system"),
    }
    fitted |= budgets(available_memory(), _weights(chosen.engine, kind), free_disk(where.data))
    return Effective(resolve([fitted, *layers]), where, kind)


def engine_kind(engine: EngineConfig) -> str:
    if engine.kind != "auto":
        return engine.kind
    return "attached" if engine.url else "mlx"


def require_installed(kind: str) -> None:
    """Raises ``LaunchError`` with the command that installs what ``kind`` needs."""
    if kind == "mlx" and importlib.util.find_spec("mlx_lm") is None:
        raise LaunchError(f"the mlx engine is not installed; run: {INSTALL_MLX}")


def _weights(engine: EngineConfig, kind: str) -> int | None:
    """What the model will take of this machine's memory, without loading or converting it."""
    if kind in ("attached", "fake"):
        return 0
    widened = engine.dtype == "float32" or (engine.dtype == "auto" and sys.platform == "linux")
    if not engine.model:
        return WEIGHTS_BYTES * (2 if widened else 1)
    return weights_bytes(Path(engine.model).expanduser(), widened)
