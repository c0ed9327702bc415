"""The effective settings: all sources joined, and values that were not set fitted to this machine.

Each replica of a model has its own settings: its part of the budgets, its folder, its address.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from engines.config import EngineConfig
from kvstore.codecs.names import CODECS, canonical, parts_of, unknown
from kvstore.codecs.registration import import_registering
from kvstore.config import AUTO, StoreConfig
from kvstore.errors import UnknownCodec
from launch.errors import LaunchError, UsageError
from launch.machine.folders import Folders, folders
from launch.machine.installation import find_python, require_vllm
from launch.machine.resources import Gpu, available_memory, find_gpus, free_disk
from launch.model.find import WEIGHTS_BYTES
from launch.settings.budgets import (
    at_once,
    budget_layers,
    default_budgets,
    entry_layer,
    weights_bytes,
)
from launch.settings.schema import (
    EngineEntry,
    Resolved,
    Settings,
    check_entries,
    laid_over,
    resolve,
)
from launch.settings.sources import Layer, Value

ATTACHABLE = ("auto", "mlx", "vllm", "attached")
# The sample model often fails to end its answer, and filling its context takes minutes.
SAMPLE_ANSWER = Value(1024, "the sample model")
OURS = ("mlx", "vllm")
INSTALL_MLX = "pip install 'thermocline[mlx]' (or bash launch/install.sh in a checkout)"


class EngineSettings(NamedTuple):
    """An entry of ``engines`` and its settings, in the form of those of a single engine."""

    entry: EngineEntry
    effective: EffectiveSettings


@dataclass(frozen=True)
class EffectiveSettings:
    """Settings in which every value is known, and what follows from them on this machine."""

    resolved: Resolved
    folders: Folders
    engine_kind: str  # a name in launch.engine_start, or module:Attr; never "auto"
    hot_on_gpu: bool = False  # live KV is in a GPU's own memory, not in this machine's
    room: int = 0  # bytes that weights and live KV have to fit into
    widens: bool = False  # dtype "auto" means float32, which CPUs multiply fastest
    capacity: tuple[str, ...] = ()  # lines that say what was chosen for capacity.sessions
    assumes_gpu: bool = False  # planned as if there were a GPU, although this machine has none
    planned_weights: int | None = None  # bytes of weights that a plan assumes; None = as on disk
    # The settings of each engine, if there are several; () = this object is for the only one.
    engines: tuple[EngineSettings, ...] = ()

    @property
    def settings(self) -> Settings:
        return self.resolved.settings

    @property
    def is_ours(self) -> bool:
        """True for mlx and vllm, which run on this machine and can measure the model."""
        return self.engine_kind in OURS

    @property
    def each(self) -> tuple[EngineSettings, ...]:
        """The settings of each engine; those of a single engine have an entry without a name."""
        return self.engines or (EngineSettings(EngineEntry(name=""), self),)


def effective_settings(
    layers: Sequence[Layer],
    environ: Mapping[str, str],
    *,
    assume_gpu: bool = False,
    planned_weights: int | None = None,
) -> EffectiveSettings:
    """Join ``layers``, where later ones win, and fit values that are not set to this machine.

    Args:
        assume_gpu: if the engine is vLLM and there is no GPU, plan as if there were one.
        planned_weights: bytes that a plan assumes for the weights of the only model.

    Raises:
        UsageError: a setting is wrong.
    """
    chosen = resolve(layers).settings
    _check_codecs(chosen.store)
    where = folders(chosen.data_dir, chosen.cache_dir, environ)
    gpus = find_gpus()
    kind = engine_kind(chosen.engine, gpus)
    gpus = gpus[: chosen.engine.vllm.tensor_parallel] if kind == "vllm" else []
    assumes_gpu = assume_gpu and kind == "vllm" and not gpus
    widens = sys.platform == "linux" and kind in OURS and not gpus and not assumes_gpu
    fitted: Layer = {
        "data_dir": Value(str(where.data), "this system"),
        "cache_dir": Value(str(where.cache), "this system"),
    }
    if not chosen.engine.model and not chosen.engines and kind in OURS:
        fitted["gateway.default_max_tokens"] = SAMPLE_ANSWER
    if kind == "vllm":
        given = chosen.engine.vllm.python
        origin = resolve(layers).origin("engine.vllm.python") if given else "found here"
        layers = [*layers, {"engine.vllm.python": Value(find_python(given), origin)}]
    available = available_memory()
    on_gpu = sum(x.free_bytes or 0 for x in gpus)  # 0: no GPU, or it shares the machine's memory
    alone = _each_alone(layers, chosen, environ, assume_gpu)
    weights: int | None
    if planned_weights is not None:
        weights = planned_weights * chosen.engine.replicas
    elif alone:
        weights = _weights_at_once(alone, chosen.capacity.on_demand)
    else:
        weights = _weights(chosen.engine, kind, widens)
    fitted |= default_budgets(available, weights, free_disk(where.data), gpu_bytes=on_gpu)
    effective = EffectiveSettings(
        resolve([fitted, *layers]),
        where,
        kind,
        hot_on_gpu=on_gpu > 0,
        room=on_gpu or available,
        widens=widens,
        assumes_gpu=assumes_gpu,
        planned_weights=planned_weights,
    )
    return replace(effective, engines=_divided(effective, alone)) if alone else effective


def _check_codecs(store: StoreConfig) -> None:
    """Import the modules that register codecs, and check the codec's name and parameters."""
    try:
        import_registering(store.codec_modules)
    except UnknownCodec as error:
        raise UsageError(str(error)) from error
    name = store.codec
    rows = parts_of(name).rows
    try:
        canonical(name)
        if name != AUTO and ":" not in rows and rows not in CODECS:
            raise ValueError(unknown(rows))
    except ValueError as error:
        raise UsageError(f"store.codec: {error}") from error


def _each_alone(
    layers: Sequence[Layer], chosen: Settings, environ: Mapping[str, str], assume_gpu: bool
) -> list[EngineSettings]:
    """Return the settings of each of several engines, with the budgets of a single engine."""
    if not chosen.engines:
        return []
    given = next(x["engines"].value for x in reversed(layers) if "engines" in x)
    check_entries(chosen.engines, given)
    if chosen.capacity.sessions:
        raise UsageError(
            "capacity.sessions is for one model; give several their budgets in bytes (--hot, --ram,"
            " --disk), and each its share"
        )
    data = chosen.store.disk_path or folders(chosen.data_dir, chosen.cache_dir, environ).data
    return [
        EngineSettings(
            entry,
            effective_settings(
                [*layers, entry_layer(fields, entry, str(data))], environ, assume_gpu=assume_gpu
            ),
        )
        for entry, fields in zip(chosen.engines, given, strict=True)
    ]


def _weights_at_once(alone: Sequence[EngineSettings], places: int) -> int | None:
    """Return the bytes of the models that may be loaded at once; None if one is unknown."""
    sizes = [_weights(x.settings.engine, x.engine_kind, x.widens) for _, x in alone]
    known = [x for x in sizes if x is not None]
    if len(known) < len(sizes):
        return None
    return at_once([entry for entry, _ in alone], places, known)


def _divided(
    effective: EffectiveSettings, alone: Sequence[EngineSettings]
) -> tuple[EngineSettings, ...]:
    """Give each engine its part of the machine's budgets."""
    settings = effective.settings
    entries, places = [x.entry for x in alone], settings.capacity.on_demand
    budgets = budget_layers(entries, places, settings.budgets)
    return tuple(
        EngineSettings(x.entry, replace(x.effective, resolved=laid_over(x.effective.resolved, own)))
        for x, own in zip(alone, budgets, strict=True)
    )


def engine_kind(engine: EngineConfig, gpus: Sequence[Gpu]) -> str:
    """Return the engine to use. "auto" is vLLM if it and a GPU are here, else mlx."""
    if (engine.url or engine.replica_list) and engine.kind in ATTACHABLE:
        return "attached"
    if engine.kind != "auto":
        return engine.kind
    return "vllm" if gpus and find_python(engine.vllm.python) else "mlx"


def require_installed(effective: EffectiveSettings) -> None:
    """Check that the engine is installed. Raises ``LaunchError`` with the command to install it."""
    kind = effective.engine_kind
    if kind == "mlx" and importlib.util.find_spec("mlx_lm") is None:
        raise LaunchError(f"the mlx engine is not installed; run: {INSTALL_MLX}")
    if kind == "vllm":
        require_vllm(effective.settings.engine.vllm.python, effective.settings.store)


def _weights(engine: EngineConfig, kind: str, widens: bool) -> int | None:
    """Return the bytes that the weights of all replicas will take; None if unknown."""
    if kind in ("attached", "fake"):
        return 0
    widened = engine.dtype == "float32" or (engine.dtype == "auto" and widens)
    if not engine.model:
        return WEIGHTS_BYTES * (2 if widened else 1) * engine.replicas
    folder = Path(engine.model).expanduser()
    known = weights_bytes(folder, widened) or _estimated(folder / "config.json", widened)
    return None if known is None else known * engine.replicas


def _estimated(config: Path, widened: bool) -> int | None:
    """Estimate the bytes of a model's weights from its config.json; None if that fails."""
    from launch.families.weights import estimated_weights  # pulls in numpy

    try:
        content = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    found = estimated_weights(content) if isinstance(content, dict) else None
    return found * 2 if found and widened else found


def replica_settings(effective: EffectiveSettings) -> dict[str, EffectiveSettings]:
    """Return the settings of each replica of one engine by the replica's name.

    An engine without replicas counts as one replica. The first replica has the folder that the
    engine would have without replicas, so its stored sessions stay in use.

    Raises:
        UsageError: the settings of replicas contradict each other.
    """
    engine = effective.settings.engine
    urls, controls = engine.url.split(), engine.control.split()
    if engine.replica_list:
        if urls or controls or engine.token:
            raise UsageError(
                "engine.replica_list names the addresses of all replicas, and their token follows"
                " from store.secret_file; leave out engine.url, engine.control and engine.token"
            )
        return {"listed": effective}
    if effective.engine_kind == "attached":
        if engine.replicas > 1:
            raise UsageError("engine.replicas: of engines that run elsewhere, name each one's url")
        if len(urls) != len(set(urls)):
            raise UsageError("engine.url: one engine is named twice")
        if len(urls) > 1 and len(urls) != len(controls):
            raise UsageError(
                f"engine.control: {len(urls)} urls need as many control addresses, in their order;"
                f" {len(controls)} are given"
            )
        origin = "one of several addresses"
        return _laid_over(
            effective,
            {
                url: {"engine.url": Value(url, origin), "engine.control": Value(control, origin)}
                for url, control in zip(urls, controls, strict=len(urls) > 1)
            },
        )
    if engine.replicas > 1 and effective.settings.capacity.sessions:
        raise UsageError(
            "capacity.sessions is for one engine; give replicas their budgets in bytes (--hot,"
            " --ram, --disk): they share them"
        )
    folder = effective.settings.store.disk_path or str(effective.folders.data)
    parts: dict[str, Layer] = {}
    for number in range(engine.replicas):
        origin = f"replica {number} of {engine.replicas}"
        budgets = effective.settings.budgets.items()
        parts[str(number)] = {x: Value(n // engine.replicas, origin) for x, n in budgets}
        # No folder of a model ends in "+1": names are percent-encoded, "+" too.
        own = folder if number == 0 else f"{folder}+{number}"
        parts[str(number)]["store.disk_path"] = Value(own, origin)
    return _laid_over(effective, parts)


def _laid_over(
    effective: EffectiveSettings, layers: Mapping[str, Layer]
) -> dict[str, EffectiveSettings]:
    if len(layers) < 2:
        return {next(iter(layers), "0"): effective}
    return {
        name: replace(effective, resolved=laid_over(effective.resolved, layer))
        for name, layer in layers.items()
    }
