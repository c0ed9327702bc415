"""All settings in one frozen struct, and the source of each value.

Later sources win:

1. defaults, in the ``config.py`` of each room; memory budgets fitted to this machine
   (``launch.settings.default_budgets``);
2. a profile, ``launch/profiles/NAME.toml`` (``--profile`` or ``THERMOCLINE_PROFILE``);
3. a file (``--config`` or ``THERMOCLINE_CONFIG``);
4. the environment, ``THERMOCLINE_<ROOM>__<FIELD>``, such as ``THERMOCLINE_ENGINE__MAX_BATCH``;
5. the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from engines.config import EngineConfig
from gateway.config import GatewayConfig
from kvstore.config import StoreConfig
from launch.errors import UsageError
from launch.settings.engine_entry import EngineEntry
from launch.settings.sources import Layer, nested
from scheduler.config import SchedulerConfig

Count = Annotated[int, msgspec.Meta(ge=0)]


class CapacityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of capacity: how many sessions are to be kept, and how long each may grow."""

    sessions: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0  # 0 = no wish
    context: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0  # tokens of each
    on_demand: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # such models that are loaded at once

    def __post_init__(self) -> None:
        if bool(self.sessions) != bool(self.context):
            raise ValueError(
                "sessions and context belong together: how many sessions"
                " (--sessions 200), and of how many tokens each (--context 8192)"
            )


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings. ``data_dir`` and ``cache_dir``: "" = the system's customary folders."""

    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    store: StoreConfig = StoreConfig()
    # Several models, each with an engine of its own; () = the one that ``engine`` describes.
    engines: tuple[EngineEntry, ...] = ()
    capacity: CapacityConfig = CapacityConfig()
    data_dir: str = ""  # holds the server's secret and the cold sessions on disk
    cache_dir: str = ""  # holds what can be made again: the sample model, a BLAS
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    # Serve on an address that others can reach although no API key is set.
    allow_anonymous: bool = False


@dataclass(frozen=True)
class Resolved:
    """Settings, and the source of every value that is not a default."""

    settings: Settings
    origins: Mapping[str, str]

    def origin(self, name: str) -> str:
        """The source of a setting's value, in words."""
        return self.origins.get(name, "default")


def resolve(layers: Sequence[Layer]) -> Resolved:
    """Lay the sources over each other, the last one on top.

    Raises:
        UsageError: names the setting, its source and the mistake.
    """
    merged: Layer = {}
    for layer in layers:
        merged.update(layer)
    origins = {name: value.origin for name, value in merged.items()}
    try:
        return Resolved(msgspec.convert(nested(merged), Settings), origins)
    except msgspec.ValidationError as error:
        raise UsageError(_explain(str(error), origins)) from error


def laid_over(resolved: Resolved, layer: Layer) -> Resolved:
    """Return settings with those of ``layer`` in their place."""
    tree = msgspec.to_builtins(resolved.settings)
    for name, value in layer.items():
        *rooms, field = name.split(".")
        inner = tree
        for room in rooms:
            inner = inner[room]
        inner[field] = value.value
    origins = {name: value.origin for name, value in layer.items()}
    return Resolved(msgspec.convert(tree, Settings), {**resolved.origins, **origins})


def _explain(message: str, origins: Mapping[str, str]) -> str:
    """Put the path to the front of "Expected `int` >= 1 - at `$.engine.max_batch`" (msgspec's)."""
    reason, _, path = message.partition(" - at `$.")
    name = re.sub(r"\[.*\]$", "", path.rstrip("`"))
    source = f" (from {origins[name]})" if name in origins else ""
    return f"{name}{source}: {reason}" if name else reason


def flat(settings: Settings) -> dict[str, Any]:
    """The value of each setting by its dotted name, in the order of the definition."""
    return _flat(msgspec.to_builtins(settings), "")


def _flat(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + key
        rows |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return rows


def masked(name: str, value: Any) -> Any:
    """``value`` as it may be shown: without passwords and key hashes."""
    if name in ("gateway.api_keys", "gateway.admin_keys"):
        return [f"{line.partition(':')[0]}:***" for line in value]
    if name == "engine.token" and value:
        return "***"
    if name == "engines":
        return [_masked_entry(x) for x in value]
    if isinstance(value, str) and "://" in value:
        return " ".join(map(_without_password, value.split(" ")))
    return value


def _masked_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: masked(f"engine.{name}", value) for name, value in entry.items()}


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
        given = parts.password
    except ValueError:  # not a URL: anything in it may be secret
        return "***"
    if given is not None:
        parts = parts._replace(netloc=f"{parts.username}:***@{parts.netloc.rpartition('@')[2]}")
    return urlunsplit(parts._replace(query=re.sub(r"(password=)[^&]*", r"\1***", parts.query)))
