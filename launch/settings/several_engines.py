"""Divides one machine's budgets among several engines.

Live KV, packed sessions in RAM and those on disk have one budget each, for the whole machine. A
model's part of memory is by its ``share`` among the models that may be loaded at the same time: all
that always are, and as many on demand as there are places for, the largest shares. So what is
loaded never adds up to more than the budget. The disk is divided among all models, since sessions
rest there while their model is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from launch.settings.engine_entry import EngineEntry
from launch.settings.fields import Value
from launch.settings.sources import Layer
from launch.settings.units import show_bytes

_OF_THE_ENTRY = ("name", "aliases", "load", "unload_after_s", "share")
_IN_MEMORY = ("engine.hot_bytes", "store.ram_bytes")


def at_once(entries: Sequence[EngineEntry], places: int, sizes: Sequence[int]) -> int:
    """Add up the sizes of the models that may be loaded at once, the largest of those on demand.

    Args:
        places: models on demand that may be loaded at once.
        sizes: one for each entry.
    """
    pairs = list(zip(sizes, entries, strict=True))
    on_demand = sorted((size for size, x in pairs if x.load == "on-demand"), reverse=True)
    return sum(size for size, x in pairs if x.load == "always") + sum(on_demand[:places])


def entry_layer(given: Mapping[str, Any], entry: EngineEntry, data_dir: str) -> Layer:
    """Return an entry's settings as a source of settings for its engine, without its budgets.

    Args:
        given: what stands in the entry, and no defaults.
    """
    origin = f"engines, {entry.name}"
    layer = {
        f"engine.{name}": Value(value, origin)
        for name, value in _flat(given).items()
        if name not in _OF_THE_ENTRY
    }
    folder = f"{data_dir}/models/{quote(entry.name, safe='')}"
    return layer | {
        "engine.served_model_name": Value(entry.name, origin),
        "store.disk_path": Value(folder, origin),
        "engines": Value((), origin),
    }


def budget_layers(
    entries: Sequence[EngineEntry], places: int, totals: Mapping[str, int]
) -> list[Layer]:
    """Divide the totals; returns the budgets of each entry as a source of settings.

    Args:
        places: models on demand that may be loaded at once.
        totals: bytes of the machine, by the names of settings.
    """
    shares = [x.share for x in entries]
    loaded, all_shares = at_once(entries, places, shares), sum(shares)
    return [
        {name: _part(totals[name], share, loaded) for name in _IN_MEMORY}
        | {"store.disk_bytes": _part(totals["store.disk_bytes"], share, all_shares)}
        for share in shares
    ]


def _part(total: int, share: int, of: int) -> Value:
    return Value(total * share // of, f"engines: {share} of {of} parts of {show_bytes(total)}")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + key
        rows |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return rows
