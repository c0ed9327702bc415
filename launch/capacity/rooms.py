"""The memory and disk that budgets may be taken from, and the budgets that are given already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launch.machine.memory import free_disk
from launch.settings.default_budgets import DISK_SHARE
from launch.settings.effective_settings import EffectiveSettings

_DERIVED = "derived:"  # how the origin of a budget begins that was not set


@dataclass(frozen=True)
class Rooms:
    """Bytes. ``given_*``: a budget that the operator set, which stays; None = it may be chosen."""

    hot: int  # the most that live KV may have
    ram: int  # the most that sleeping sessions in memory may have
    shared: int  # the most of both together; on a GPU with memory of its own they share nothing
    disk: int
    given_hot: int | None = None
    given_ram: int | None = None
    given_disk: int | None = None
    redis: int = 0  # 0 = there is none
    awake: int = 16  # sessions that should find room to be answered at once


def rooms_of(effective: EffectiveSettings) -> Rooms:
    """Find this machine's room. Half of the memory left by the weights stays free, as always."""
    engine, store = effective.settings.engine, effective.settings.store
    hot, ram = engine.hot_bytes, store.ram_bytes
    given_hot = _given(effective, "engine.hot_bytes", hot)
    given_ram = _given(effective, "store.ram_bytes", ram)
    shared = hot + ram
    apart = effective.hot_on_gpu
    most_hot = hot if apart or given_ram is not None else shared
    most_ram = ram if apart or given_hot is not None else shared
    folder = Path(store.disk_path) if store.disk_path else effective.folders.data
    return Rooms(
        hot=most_hot,
        ram=most_ram,
        shared=most_hot + most_ram if apart else shared,
        disk=int((free_disk(folder) + _held(folder)) * DISK_SHARE),
        given_hot=given_hot,
        given_ram=given_ram,
        given_disk=_given(effective, "store.disk_bytes", store.disk_bytes),
        redis=store.redis_bytes if store.redis_url else 0,
        awake=engine.max_batch,
    )


def _given(effective: EffectiveSettings, name: str, value: int) -> int | None:
    return None if effective.resolved.origin(name).startswith(_DERIVED) else value


def _held(folder: Path) -> int:
    """Bytes that the disk tier holds there already: they count as free, being its own."""
    return sum(file.stat().st_size for file in folder.glob("**/cold/*.mdb"))
