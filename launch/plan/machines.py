"""Computes how many sessions of a model other machines would keep; nothing is measured there.

It is assumed that nothing else runs on the machine. KV gets the default share of its memory, or the
budgets of the command line, divided as by ``fit.py`` for more sessions than fit. The codec is the
one that most models get, or that of the command line.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import msgspec

from engines.kv_budget import UNSTATED_CONTEXT, stated_context
from kvstore.codecs.names import EXACT, USUAL
from kvstore.codecs.presets import open_codec
from kvstore.config import AUTO
from kvstore.errors import UnknownCodec
from launch.calibrate.profile_notes import find_profile
from launch.errors import LaunchError, UsageError
from launch.families.cache_shape import CacheShape, NotUnderstood
from launch.families.table import cache_shape
from launch.families.weights import estimated_weights
from launch.model.find import find_model
from launch.plan.cold_size import cold_size
from launch.plan.fit import Asleep, Needs, Space, choose_budgets
from launch.plan.served_model import HotBudget, known_weights, too_large
from launch.settings.budgets import DISK_SHARE, default_budgets
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.units import show_bytes

GB: Final = 10**9
BF16_BYTES: Final = 2
FREE: Final = 0.9  # the share of a machine's memory that its system leaves free
DISK_FREE: Final = 0.8  # the share of a machine's disk that is free
MANY: Final = 10_000_000  # more sessions than any of the machines keeps


class Machine(NamedTuple):
    """A machine as it is usually sold, with its smallest disk.

    ``gpu_gb``: the GPU's own memory; 0 = it shares the machine's.
    """

    name: str
    engine: Literal["mlx", "vllm"]
    memory_gb: int
    disk_gb: int
    gpu_gb: int = 0


MACHINES: Final = (
    Machine("GB10 (DGX Spark), 128 GB unified", "vllm", 128, 1000),
    Machine("GPU of 24 GB, 64 GB of memory", "vllm", 64, 1000, 24),
    Machine("GPU of 48 GB, 128 GB of memory", "vllm", 128, 1000, 48),
    Machine("GPU of 80 GB, 256 GB of memory", "vllm", 256, 2000, 80),
    Machine("GPU of 96 GB, 256 GB of memory", "vllm", 256, 2000, 96),
    Machine("Mac, 32 GB unified", "mlx", 32, 500),
    Machine("Mac, 64 GB unified", "mlx", 64, 1000),
    Machine("Mac, 128 GB unified", "mlx", 128, 1000),
)


class MachinePlan(msgspec.Struct, frozen=True):
    """The plan for sessions of one length on one machine."""

    machine: str
    engine: str
    context: int
    kv_bytes: int = 0  # memory for live KV and sleeping sessions together
    hot_only: int = 0  # hot sessions if live KV had all of that
    hot: int = 0  # hot sessions
    ram: int = 0  # asleep in memory
    disk: int = 0  # asleep on disk
    codec: str = ""
    refused: str = ""  # why the machine cannot serve the model; all numbers are 0 then
    reserve_bytes: int = 0  # for the system and temporary arrays, in the memory of the weights
    disk_bytes: int = 0
    weights_bytes: int = 0
    weights_estimated: bool = False  # from config.json

    @property
    def alive(self) -> int:
        """The number of sessions that are kept: hot, or asleep in the tier that holds most."""
        return max(self.hot, self.ram, self.disk)


class OtherBudgets(NamedTuple):
    """Budgets of the command line, in bytes; None = the default for the machine.

    Budgets from files and the environment are not used: they are meant for this machine.
    """

    hot: int | None
    ram: int | None
    disk: int | None


def machine_plans(
    effective: EffectiveSettings,
    contexts: list[int] | None = None,
    weights: int | None = None,
    bits: float | None = None,
) -> list[MachinePlan]:
    """Return a row for every machine and each length of session.

    Args:
        contexts: lengths of sessions in tokens; None = 8,192.
        weights: bytes of the model's weights; None = those of its files, or an estimate.
        bits: bits per weight after an assumed quantisation; None = as config.json says.

    Raises:
        UsageError, LaunchError: there is no such model, or its size or cache is not known.
    """
    model = _weighed(effective, weights, bits)
    if not model.weights:
        raise UsageError(
            f"the weights of {model.name} are not here, and their size cannot be estimated from its"
            " config.json: give it, for instance --weights 18GiB"
        )
    given = OtherBudgets(
        *(
            x if _is_asked(effective, name) else None
            for name, x in effective.settings.budgets.items()
        )
    )
    lengths = dict.fromkeys(min(x, model.longest) for x in contexts or [8192])
    return [_row(effective, model, x, given, length) for x in MACHINES for length in lengths]


class _Weighed(NamedTuple):
    """A model and the size of its weights."""

    name: str
    content: dict[str, Any]  # of its config.json
    longest: int  # tokens of its context
    weights: int  # bytes; 0 = not known
    is_estimated: bool  # from config.json


def _weighed(
    effective: EffectiveSettings, weights: int | None = None, bits: float | None = None
) -> _Weighed:
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    content = model.config()
    if bits is not None:
        content = {**content, "quantization": {"bits": bits}}
    known = weights or (known_weights(model) if bits is None else None)
    longest = stated_context(content) or UNSTATED_CONTEXT
    found = known or estimated_weights(content) or 0
    return _Weighed(model.name, content, longest, found, is_estimated=not known)


def _row(
    effective: EffectiveSettings,
    model: _Weighed,
    machine: Machine,
    given: OtherBudgets,
    context: int,
) -> MachinePlan:
    """Return the plan of one machine; if it cannot serve the model, ``refused`` says why."""
    row = MachinePlan(
        machine.name,
        machine.engine,
        context,
        weights_bytes=model.weights,
        weights_estimated=model.is_estimated,
    )
    available, gpu = int(machine.memory_gb * GB * FREE), int(machine.gpu_gb * GB * FREE)
    try:
        shape = cache_shape(model.content, machine.engine)
        refused = too_large(model.weights, gpu or available)
        refused = refused or _too_much(given, available, gpu, model.weights)
    except NotUnderstood as error:
        refused = str(error)
    if refused:
        return msgspec.structs.replace(row, refused=refused)
    space = _space(given, available, gpu, model.weights, int(machine.disk_gb * GB * DISK_FREE))
    hot = HotBudget(shape, BF16_BYTES, space.hot, model.longest, machine.engine == "mlx")
    if not hot.sessions(context):
        reason = f"{context:,} tokens do not fit beside the weights"
        return msgspec.structs.replace(row, refused=reason)
    asleep = _asleep(effective, shape, context)
    needs = Needs(context, hot.running_bytes(context), hot.idle_bytes(context), asleep)
    budgets = choose_budgets(needs, space, MANY)
    live = space.hot if gpu else space.shared
    return msgspec.structs.replace(
        row,
        kv_bytes=space.shared,
        reserve_bytes=(machine.gpu_gb or machine.memory_gb) * GB - model.weights - live,
        hot_only=hot.sessions(context),
        hot=budgets.num_hot,
        ram=budgets.num_held.get("ram", 0),
        disk=budgets.num_held.get("disk", 0),
        codec=asleep.codec,
        disk_bytes=space.disk if space.given_disk is None else space.given_disk,
    )


def _is_asked(effective: EffectiveSettings, name: str) -> bool:
    """Return True if a setting was given on the command line."""
    return effective.resolved.origin(name).startswith("--")


def _too_much(given: OtherBudgets, available: int, gpu: int, weights: int) -> str:
    """Return the reason why a machine has no room for these budgets; "" if it has."""
    hot, ram = given.hot or 0, given.ram or 0
    if gpu:
        flags = {"--hot": (hot, gpu - weights), "--ram": (ram, available)}
    else:
        flags = {"--hot and --ram": (hot + ram, available - weights)}
    for flag, (nbytes, free) in flags.items():
        if nbytes > free:
            return f"{flag} would take {show_bytes(nbytes)}, and {show_bytes(free)} are free"
    return ""


def _space(given: OtherBudgets, available: int, gpu: int, weights: int, disk_free: int) -> Space:
    """Return the space on a machine: the default budgets of memory, and half of the free disk."""
    layer = default_budgets(available, weights, disk_free, gpu)
    hot, ram = (int(layer[x].value) for x in ("engine.hot_bytes", "store.ram_bytes"))
    hot = hot if given.hot is None else given.hot
    if given.ram is not None:
        ram = given.ram
        hot = hot if gpu else min(hot, available - weights - ram)
    together = 0 if gpu else hot + ram  # in one memory each may take the room that the other leaves
    return Space(
        hot=hot if given.ram is not None else max(hot, together),
        ram=ram if given.hot is not None else max(ram, together),
        shared=hot + ram,
        disk=int(disk_free * DISK_SHARE),
        given_hot=given.hot,
        given_ram=given.ram,
        given_disk=given.disk,
    )


def _asleep(effective: EffectiveSettings, shape: CacheShape, context: int) -> Asleep:
    named = effective.settings.store.codec
    is_asked = _is_asked(effective, "store.codec") and named != AUTO
    refused = f"--codec {named} cannot be counted" if is_asked else "its sessions cannot sleep"
    for name in (named,) if is_asked else (USUAL, EXACT):
        try:
            codec = open_codec(name, find_profile(effective))
            nbytes = cold_size(shape, codec, "bfloat16", context).total
            return Asleep(name, nbytes, planned=True)
        except UnknownCodec as error:
            last = error
    raise LaunchError(f"{refused}: {last}") from last
