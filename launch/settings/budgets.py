"""The memory and disk budgets of this machine: those that were not set, and each engine's part.

Of the memory that is left beside the weights, live KV gets about a third (running turns need it),
the packed sessions in RAM a third of that (packed they are a fifth of the size), and half stays
free for prefill, the codec and other programs.

A GPU with memory of its own changes that: it holds the weights and live KV only, and the machine's
memory is there for packed sessions.

Live KV, packed sessions in RAM and those on disk have one budget each, for the whole machine. A
model's part of memory is by its ``share`` among the models that may be loaded at the same time: all
that always are, and as many on demand as there are places for, the largest shares. So what is
loaded never adds up to more than the budget. The disk is divided among all models, since sessions
rest there while their model is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvstore.config import StoreConfig
from kvstore.tiers.disk_budget import MIN_FILE_BYTES
from launch.settings.schema import EngineEntry, flattened
from launch.settings.sources import Layer, Value
from launch.settings.units import show_bytes

HOT_SHARE = 0.35
RAM_SHARE = 0.12
DISK_SHARE = 0.5
GPU_HOT_SHARE = 0.8  # the rest is for activations, graphs and the driver
GPU_RAM_SHARE = 0.35
SMALLEST = 128 << 20
DISK_MOST = StoreConfig().disk_bytes
DERIVED = "derived"  # begins the origin of a budget that follows from the free space
_OF_THE_ENTRY = ("name", "aliases", "load", "unload_after_s", "share")
_IN_MEMORY = ("engine.hot_bytes", "store.ram_bytes")


def weights_bytes(folder: Path, widened: bool) -> int | None:
    """Bytes of memory that a local model's weights will take; None if they are not here.

    Args:
        widened: the engine turns 16-bit weights into float32.
    """
    stored = sum(x.stat().st_size for x in folder.glob("*.safetensors"))
    return stored * (2 if widened else 1) or None


def default_budgets(
    available: int, weights: int | None, disk_free: int, gpu_bytes: int = 0
) -> Layer:
    """Defaults for ``engine.hot_bytes``, ``store.ram_bytes`` and ``store.disk_bytes``.

    Args:
        available: bytes of memory that can be allocated now.
        weights: bytes of it that the model will take; None if unknown: half is then set aside.
        disk_free: bytes free where the cold sessions will lie.
        gpu_bytes: free on GPUs with memory of their own, where the model will be; 0 = none.
    """
    room = gpu_bytes or available
    left = room // 2 if weights is None else max(0, room - weights)
    beside = "an unknown model" if weights is None else f"{show_bytes(weights)} of weights"
    where = "on the GPU" if gpu_bytes else "of memory available"
    memory = f"{show_bytes(room)} {where}, beside {beside}"
    own = f"{show_bytes(available)} of memory available"
    disk = min(DISK_MOST, _round(disk_free * DISK_SHARE))
    return {
        "engine.hot_bytes": _share(left, GPU_HOT_SHARE if gpu_bytes else HOT_SHARE, memory),
        "store.ram_bytes": (
            _share(available, GPU_RAM_SHARE, own) if gpu_bytes else _share(left, RAM_SHARE, memory)
        ),
        "store.disk_bytes": Value(
            disk if disk >= MIN_FILE_BYTES else 0,
            f"{DERIVED}: {DISK_SHARE:.0%} of {show_bytes(disk_free)} free on disk, at most"
            f" {show_bytes(DISK_MOST)}",
        ),
    }


def _share(left: int, share: float, memory: str) -> Value:
    nbytes = max(SMALLEST, _round(left * share))
    return Value(nbytes, f"{DERIVED}: {share:.0%} of {memory}")


def _round(nbytes: float) -> int:
    """``nbytes`` cut down to whole MiB: a budget is an intention, not a measurement."""
    return int(nbytes) >> 20 << 20


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
        for name, value in flattened(given).items()
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
