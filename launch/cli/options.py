"""Options of the command line that are settings, shared by several commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.settings.effective_settings import EffectiveSettings, effective_settings
from launch.settings.schema import Settings
from launch.settings.sources import (
    Fields,
    Layer,
    Value,
    from_assignments,
    from_environment,
    from_file,
    from_flags,
    from_profile,
)

Config = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
Profile = Annotated[
    str | None, typer.Option("--profile", help="Settings for a machine: gb10, cuda, cpu or apple.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Sets any setting; may be repeated."),
]
Model = Annotated[
    str | None, typer.Option("--model", help="Local folder or hub id; default: the sample model.")
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Local folder or hub id; default: the sample model. Several: each gets an engine.",
    ),
]
Codec = Annotated[
    str | None,
    typer.Option("--codec", help="How sessions are packed: auto, raw, dense3, max, tq4 ..."),
]
Hot = Annotated[
    str | None, typer.Option("--hot", metavar="SIZE", help="Budget of live KV, e.g. 4GiB.")
]
Ram = Annotated[
    str | None, typer.Option("--ram", metavar="SIZE", help="Budget of cold KV in memory.")
]
Disk = Annotated[
    str | None, typer.Option("--disk", metavar="SIZE", help="Budget of cold KV on disk.")
]
Sessions = Annotated[
    int | None,
    typer.Option("--sessions", metavar="N", help="Number of sessions to keep, awake or asleep."),
]
SessionContext = Annotated[
    int | None, typer.Option("--context", metavar="N", help="Tokens of each of these sessions.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

# Profiles of machines whose engine computes on a GPU.
GPU_PROFILES = ("cuda", "gb10")
# Flag -> setting.
FLAGS: Mapping[str, str] = {
    "--model": "engine.model",
    "--engine": "engine.kind",
    "--engine-url": "engine.url",
    "--engine-control": "engine.control",
    "--served-model-name": "engine.served_model_name",
    "--hot": "engine.hot_bytes",
    "--host": "gateway.host",
    "--port": "gateway.port",
    "--api-keys": "gateway.api_keys_file",
    "--ram": "store.ram_bytes",
    "--disk": "store.disk_bytes",
    "--redis": "store.redis_url",
    "--sessions": "capacity.sessions",
    "--context": "capacity.context",
    "--codec": "store.codec",
    "--idle-after": "scheduler.idle_after_s",
    "--data-dir": "data_dir",
    "--log-level": "log_level",
    "--allow-anonymous": "allow_anonymous",
}


def chosen(
    context: typer.Context,
    environ: Mapping[str, str],
    *,
    as_profiled: bool = False,
    planned_weights: int | None = None,
) -> EffectiveSettings:
    """Return the settings of a command; its options win over all other sources.

    Args:
        as_profiled: if the profile is for a GPU and this machine has none, plan as if it had one.
        planned_weights: bytes that a plan assumes for the weights; None = as on disk.

    Raises:
        UsageError: a setting is wrong.
    """
    given = context.params
    flags = {x: given[name] for x in FLAGS if (name := _parameter(x)) in given}
    if isinstance(flags.get("--model"), list | tuple):
        models = flags["--model"] or [None]
        flags["--model"] = models[0] if len(models) == 1 else None
        if len(models) > 1:
            flags["--models"] = [{"name": Path(x).name, "model": x} for x in models]
    sources = layers(
        environ,
        profile=given["profile"],
        config=given["config"],
        assignments=given["assignments"],
        flags=flags,
    )
    profile = given["profile"] or environ.get("THERMOCLINE_PROFILE")
    return effective_settings(
        sources,
        environ,
        assume_gpu=as_profiled and profile in GPU_PROFILES,
        planned_weights=planned_weights,
    )


def fitted(
    context: typer.Context,
    environ: Mapping[str, str],
    *,
    as_profiled: bool = False,
    planned_weights: int | None = None,
) -> EffectiveSettings:
    """Return the settings of a command, with budgets for ``capacity.sessions`` if that is set.

    Args:
        as_profiled, planned_weights: see ``chosen``.

    Raises:
        UsageError: a setting is wrong, or so many sessions do not fit; says how many would.
    """
    from launch.plan.fit import with_capacity  # pulls in the codecs

    found = chosen(context, environ, as_profiled=as_profiled, planned_weights=planned_weights)
    return with_capacity(found)


def _parameter(flag: str) -> str:
    if flag == "--context":  # typer calls its own object ``context``
        return "session_context"
    return flag.removeprefix("--").replace("-", "_")


def layers(
    environ: Mapping[str, str],
    *,
    profile: str | None = None,
    config: Path | None = None,
    assignments: list[str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> list[Layer]:
    """Return all sources of settings, weakest first. Raises ``UsageError`` for an unknown name."""
    fields = Fields(Settings)
    profile = profile or environ.get("THERMOCLINE_PROFILE")
    file = config or environ.get("THERMOCLINE_CONFIG")
    given = {FLAGS[flag]: (flag, value) for flag, value in (flags or {}).items() if flag in FLAGS}
    tables = (flags or {}).get("--models")
    return [
        from_profile(fields, profile) if profile else {},
        from_file(fields, Path(file)) if file else {},
        from_environment(fields, environ),
        from_assignments(fields, assignments or []),
        from_flags(fields, given) | ({"engines": Value(tables, "--model")} if tables else {}),
    ]
