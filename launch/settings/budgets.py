"""Memory and disk budgets: defaults for this machine, and each engine's part of them.

By default live KV gets about a third of the memory that the weights leave (running turns need it),
the packed sessions in RAM get a third of that (packing makes them a fifth of the size), and half
stays free for prefill, the codec and other programs.

With a GPU that has its own memory, the GPU holds only the weights and live KV, and the machine's
memory is for packed sessions.

There is one budget each for live KV, packed sessions in RAM and sessions on disk, for the whole
machine. Memory is divided by ``share`` among the models that may be loaded at the same time: all
that are always loaded, and of those on demand the ones with the largest shares, as many as may be
loaded at once. So the loaded models together never exceed the budget. The disk is divided among
all models, since sessions stay there while their model is not loaded.
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
DERIVED = "derived"  # the first word of the origin of a budget that follows from the free space
_OF_THE_ENTRY = ("name", "aliases", "load", "unload_after_s", "share")
_IN_MEMORY = ("engine.hot_bytes", "store.ram_bytes")


def weights_bytes(folder: Path, widened: bool) -> int | None:
    """Return the bytes of memory that a local model's weights will take; None without files.

    Args:
        widened: the engine turns 16-bit weights into float32.
    """
    stored = sum(x.stat().st_size for x in folder.glob("*.safetensors"))
    return stored * (2 if widened else 1) or None


def default_budgets(
    available: int, weights: int | None, disk_free: int, gpu_bytes: int = 0
) -> Layer:
    """Return defaults for ``engine.hot_bytes``, ``store.ram_bytes`` and ``store.disk_bytes``.

    Args:
        available: bytes of memory that can be allocated now.
        weights: bytes that the model will take; None = unknown, so half the memory is set aside.
        disk_free: free bytes on the disk of the cold sessions.
        gpu_bytes: free bytes on the GPUs that will hold the model, if they have their own memory;
            0 = there are none.
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
    """Return ``nbytes`` rounded down to whole MiB."""
    return int(nbytes) >> 20 << 20


def at_once(entries: Sequence[EngineEntry], places: int, sizes: Sequence[int]) -> int:
    """Return the largest total size of the models that may be loaded at the same time.

    That is the sum for all that are always loaded and the ``places`` largest on demand.

    Args:
        places: the number of on-demand models that may be loaded at once.
        sizes: one for each entry, in any unit.
    """
    pairs = list(zip(sizes, entries, strict=True))
    on_demand = sorted((size for size, x in pairs if x.load == "on-demand"), reverse=True)
    return sum(size for size, x in pairs if x.load == "always") + sum(on_demand[:places])


def entry_layer(given: Mapping[str, Any], entry: EngineEntry, data_dir: str) -> Layer:
    """Return an entry of ``engines`` as a source of settings for its engine, without budgets.

    Args:
        given: the fields that the user set in the entry, without defaults.
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
    """Divide the machine's budgets; return those of each entry as a source of settings.

    Args:
        places: the number of on-demand models that may be loaded at once.
        totals: the machine's budgets in bytes, by the names of the settings.
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
