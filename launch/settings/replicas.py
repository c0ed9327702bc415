"""Gives each replica of a model its settings: its part of the budgets, its folder, its address."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from launch.errors import UsageError
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.fields import Value
from launch.settings.schema import laid_over
from launch.settings.sources import Layer


def replica_settings(effective: EffectiveSettings) -> dict[str, EffectiveSettings]:
    """Return the settings of each replica of one engine by the replica's name.

    An engine without replicas has itself. The first replica keeps the folder of the only one.

    Raises:
        UsageError: what is said of replicas does not go together.
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
        pairs = zip(urls, controls, strict=len(urls) > 1)
        addresses = {url: _address(url, control) for url, control in pairs}
        return _laid_over(effective, addresses.items())
    if engine.replicas > 1 and effective.settings.capacity.sessions:
        raise UsageError(
            "capacity.sessions is for one engine; give replicas their budgets in bytes (--hot,"
            " --ram, --disk): they share them"
        )
    folder = effective.settings.store.disk_path or str(effective.folders.data)
    parts = ((str(i), _part(effective, i, folder)) for i in range(engine.replicas))
    return _laid_over(effective, parts)


def _laid_over(
    effective: EffectiveSettings, layers: Iterable[tuple[str, Layer]]
) -> dict[str, EffectiveSettings]:
    named = dict(layers)
    if len(named) < 2:
        return {next(iter(named), "0"): effective}
    return {
        name: replace(effective, resolved=laid_over(effective.resolved, layer))
        for name, layer in named.items()
    }


def _address(url: str, control: str) -> Layer:
    origin = "one of several addresses"
    return {"engine.url": Value(url, origin), "engine.control": Value(control, origin)}


def _part(effective: EffectiveSettings, number: int, folder: str) -> Layer:
    settings, num_replicas = effective.settings, effective.settings.engine.replicas
    origin = f"replica {number} of {num_replicas}"
    totals = {
        "engine.hot_bytes": settings.engine.hot_bytes,
        "store.ram_bytes": settings.store.ram_bytes,
        "store.disk_bytes": settings.store.disk_bytes,
    }
    layer = {name: Value(total // num_replicas, origin) for name, total in totals.items()}
    # No model's folder ends so: other characters of its name are percent-encoded.
    own = folder if number == 0 else f"{folder}+{number}"
    return layer | {"store.disk_path": Value(own, origin)}
