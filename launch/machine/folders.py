"""The folders in which Thermocline keeps its files, by the customs of the system it runs on.

The *cache* folder holds what can be made again (the converted sample model, cold sessions); the
*data* folder holds what cannot (the server secret). Nothing here touches the disk.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


def default_cache_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """``THERMOCLINE_CACHE_DIR``, else ``~/.cache/thermocline`` (macOS: ``~/Library/Caches``)."""
    if chosen := environ.get("THERMOCLINE_CACHE_DIR"):
        return Path(chosen).expanduser()
    if platform == "darwin":
        return _home(environ) / "Library" / "Caches" / "thermocline"
    return _xdg(environ, "XDG_CACHE_HOME", ".cache")


def default_data_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """``THERMOCLINE_DATA_DIR``, else ``~/.local/share/thermocline`` (macOS: ``~/Library``)."""
    if chosen := environ.get("THERMOCLINE_DATA_DIR"):
        return Path(chosen).expanduser()
    if platform == "darwin":
        return _home(environ) / "Library" / "Application Support" / "thermocline"
    return _xdg(environ, "XDG_DATA_HOME", ".local/share")


def _xdg(environ: Mapping[str, str], variable: str, default: str) -> Path:
    base = Path(environ.get(variable, ""))
    # The XDG specification says that a relative path is to be ignored.
    return (base if base.is_absolute() else _home(environ) / default) / "thermocline"


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ["HOME"]) if environ.get("HOME") else Path.home()


class Folders(NamedTuple):
    """The data folder and the cache folder."""

    data: Path
    cache: Path


def folders(data_dir: str, cache_dir: str, environ: Mapping[str, str]) -> Folders:
    """The folders in the settings, else those of the system's custom."""
    return Folders(
        Path(data_dir).expanduser() if data_dir else default_data_dir(environ),
        Path(cache_dir).expanduser() if cache_dir else default_cache_dir(environ),
    )
