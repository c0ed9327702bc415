"""All settings in one frozen struct, the entries of several engines, and each value's source.

Later sources win:

1. defaults, in the ``config.py`` of each package; memory budgets fitted to this machine
   (``launch.settings.budgets``);
2. a profile, ``launch/profiles/NAME.toml`` (``--profile`` or ``THERMOCLINE_PROFILE``);
3. a file (``--config`` or ``THERMOCLINE_CONFIG``);
4. the environment, ``THERMOCLINE_<SECTION>__<FIELD>``, such as ``THERMOCLINE_ENGINE__MAX_BATCH``;
5. the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from engines.config import EngineConfig
from gateway.config import GatewayConfig
from kvstore.config import StoreConfig
from kvstore.urls import masked as masked_url
from launch.errors import UsageError
from launch.settings.kinds import takes
from launch.settings.sources import Fields, Layer, nested
from scheduler.config import SchedulerConfig

_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
SECRETS = ("api_keys", "admin_keys", "token")


class EngineEntry(EngineConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model and its engine; fields that are left out are as in ``[engine]``."""

    name: str  # what clients send as ``model``
    aliases: tuple[str, ...] = ()
    load: Literal["always", "on-demand"] = "always"
    unload_after_s: Annotated[float, msgspec.Meta(gt=0)] = 1200.0  # on demand: without a request
    share: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1  # of the machine's budgets

    def __post_init__(self) -> None:
        for name in filter(None, (self.name, *self.aliases)):
            if not _NAME.fullmatch(name) or not name.strip("."):
                raise ValueError(f"{name!r} is no name: letters, digits and ._:/- are taken")
        if self.served_model_name:
            raise ValueError("name is what clients call it; leave served_model_name out")


def check_entries(entries: Sequence[EngineEntry], given: Sequence[Mapping[str, Any]]) -> None:
    """Check that the entries do not contradict each other.

    Args:
        given: the fields that the user set in each entry, without defaults.

    Raises:
        UsageError: a name is empty or used twice, or an entry sets ``hot_bytes``.
    """
    for entry, fields in zip(entries, given, strict=True):
        if not all((entry.name, *entry.aliases)):
            raise UsageError("engines: name and aliases need at least one character")
        if "hot_bytes" in fields:
            raise UsageError(
                f"engines, {entry.name}: hot_bytes is a budget of the machine, in [engine]; set"
                " this model's share of it (the default is share = 1)"
            )
    names = [name for entry in entries for name in (entry.name, *entry.aliases)]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"engines: two models go by the name {name!r}; give each [[engines]] its own name"
            )
    folded = [entry.name.casefold() for entry in entries]
    for entry in entries:  # on a case-insensitive disk both would use the same folder
        if folded.count(entry.name.casefold()) > 1:
            raise UsageError(
                f"engines: the name {entry.name!r} differs from another one only in case"
            )


class CapacityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of capacity: how many sessions are to be kept, and how long each may grow."""

    # 0 = not set
    sessions: Annotated[int, msgspec.Meta(ge=0, le=SchedulerConfig.max_sessions)] = 0
    context: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0  # tokens of each
    on_demand: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1  # on-demand models loaded at once

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

    @property
    def budgets(self) -> dict[str, int]:
        """The bytes for live KV and for the local tiers, by the names of their settings."""
        return {
            "engine.hot_bytes": self.engine.hot_bytes,
            "store.ram_bytes": self.store.ram_bytes,
            "store.disk_bytes": self.store.disk_bytes,
        }


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
    merged = {name: value for layer in layers for name, value in layer.items()}
    origins = {name: x.origin for name, x in merged.items()}
    tree = nested({name: x.value for name, x in merged.items()})
    try:
        return Resolved(msgspec.convert(tree, Settings), origins)
    except msgspec.ValidationError as error:
        raise UsageError(_explain(error, tree, origins)) from error


def laid_over(resolved: Resolved, layer: Layer) -> Resolved:
    """Return the settings with the values of ``layer`` over them."""
    values = flat(resolved.settings) | {name: x.value for name, x in layer.items()}
    origins = {**resolved.origins, **{name: x.origin for name, x in layer.items()}}
    return Resolved(msgspec.convert(nested(values), Settings), origins)


def _explain(error: msgspec.ValidationError, tree: Any, origins: Mapping[str, str]) -> str:
    """Return a message for an error such as "Expected `int` >= 1 - at `$.engines[0].max_batch`".

    It names the setting, its source, the values that it takes and the value that was given.
    """
    reason, _, path = str(error).partition(" - at `$.")
    steps = re.findall(r"[^.\[\]`]+", path)
    name = ".".join(x for x in steps if not x.isdecimal())
    origin = origins.get(name) or origins.get(steps[0], "")
    source = f" (from {origin})" if origin else ""
    kind = Fields(Settings).kind(name)
    if error.__cause__ is not None or kind is None:  # our own words
        return f"{name}{source}: {reason}"
    if reason.startswith("Object missing"):
        return f"{name}{source}: each table needs a name"
    for step in steps:
        tree = tree[int(step) if step.isdecimal() else step]
    is_shown = isinstance(tree, str | int | float) and name.rpartition(".")[2] not in SECRETS
    given = f", not {masked(name, tree)!r}" if is_shown else ""
    return f"{name}{source} takes {takes(name, kind)}{given}"


def flat(settings: Settings) -> dict[str, Any]:
    """Return the value of each setting by its dotted name, in the order of the definition."""
    return flattened(msgspec.to_builtins(settings))


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a tree of settings as one dict with dotted names."""
    rows: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + key
        rows |= flattened(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return rows


def masked(name: str, value: Any) -> Any:
    """Return ``value`` with passwords, tokens and key hashes replaced by ``***``."""
    if name in ("gateway.api_keys", "gateway.admin_keys"):
        return [f"{line.partition(':')[0]}:***" for line in value]
    if name == "engine.token" and value:
        return "***"
    if name == "engines":
        return [{x: masked(f"engine.{x}", y) for x, y in entry.items()} for entry in value]
    if isinstance(value, str) and "://" in value:
        return " ".join(map(masked_url, value.split(" ")))
    return value
