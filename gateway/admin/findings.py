"""GET /admin/findings: a running server's checks of itself, for its operator."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.routes import answer, for_admin
from gateway.edge.connections import most_connections, open_files_limit
from gateway.gateway import Gateway
from gateway.models import ServedModel
from gateway.request.routing import new_router
from kvstore.likeness import WORDS

router = new_router()
COMFORTABLE_CONNECTIONS = 512


class Finding(msgspec.Struct, frozen=True):
    """One finding: its subject, how bad it is, and the remedy."""

    about: str
    verdict: Literal["ok", "warning", "failure"]
    text: str
    advice: str = ""


@router.get("/admin/findings")
async def show_findings(request: Request) -> Response:
    """List the findings of all checks, failures first."""
    gateway = for_admin(request)
    found = [x for check in CHECKS for x in check(gateway)]
    for model in gateway.models:
        name = f" of {model.label}" if len(gateway.models) > 1 else ""
        for check_model in MODEL_CHECKS:
            found += [structs.replace(x, about=x.about + name) for x in check_model(model)]
    found.sort(key=lambda x: ("failure", "warning", "ok").index(x.verdict))
    return answer({"object": "list", "data": found})


def _engine(model: ServedModel) -> Iterator[Finding]:
    welcome = model.engine.welcome
    if model.on_demand is not None and not model.is_there:
        words = model.on_demand.failed or f"{model.state}: it is loaded when a request asks for it"
        yield Finding("engine", "warning" if model.on_demand.failed else "ok", words)
        return
    if welcome is None:
        yield Finding("engine", "failure", model.engine.trouble, "Its lines in the log say more.")
        return
    named = welcome.engine_version.startswith(welcome.engine)  # some versions include the name
    engine = "" if named else f"{welcome.engine} "
    yield Finding("engine", "ok", f"{engine}{welcome.engine_version}: {welcome.model}")
    if not welcome.hibernation:
        yield Finding(
            "sleep",
            "warning",
            f"sessions do not sleep: {welcome.hibernation_reason}",
            "`thermocline doctor` says which models can.",
        )


def _codec(model: ServedModel) -> Iterator[Finding]:
    codec = model.engine.codec
    if codec is None:
        return
    if codec.progress:
        yield Finding("codec", "ok", f"{codec.name}; {codec.progress}")
    elif codec.unmeasured:
        advice = "POST /admin/measure, or run: thermocline calibrate"
        yield Finding("codec", "warning", f"{codec.name}: {codec.why}", advice)
    else:
        yield Finding("codec", "ok", f"{codec.name}: {codec.why}")
    if codec.why_host:
        text = f"the host packs, more slowly than the GPU: {codec.why_host}"
        yield Finding("packing", "warning", text, "The engine's log has the whole error.")


def _tiers(model: ServedModel) -> Iterator[Finding]:
    report = model.live.report
    for tier in report.tiers if report else ():
        if not tier.available:
            text = f"the tier does not answer; {tier.errors} operations failed"
            yield Finding(f"tier {tier.name}", "failure", text, "Sessions there are prefilled.")
        elif tier.errors:
            text = f"{tier.errors} operations failed since the engine's start"
            yield Finding(f"tier {tier.name}", "warning", text, "The log says which.")
        elif tier.trouble:
            advice = "`thermocline doctor` reports it, too."
            yield Finding(f"tier {tier.name}", "warning", tier.trouble, advice)
        elif tier.capacity_bytes and tier.nbytes > 0.95 * tier.capacity_bytes and tier.evictions:
            text = f"it is full, and has evicted {tier.evictions} blobs"
            yield Finding(f"tier {tier.name}", "warning", text, "Make it larger, or keep less.")


def _likeness(model: ServedModel) -> Iterator[Finding]:
    for kind in model.live.report.differs if model.live.report else ():
        yield Finding("likeness", "warning", WORDS.get(kind, kind), "See docs/scale.md.")


def _reach(gateway: Gateway) -> Iterator[Finding]:
    config, tenants = gateway.config, gateway.tenants
    if config.on_loopback:
        return
    if tenants.open_to_all:
        text = f"{config.host} can be reached from other machines, and no API key is needed"
        yield Finding("access", "failure", text, "thermocline keys new TENANT --append FILE")
    else:
        text = "keys travel in plain text on this address"
        yield Finding("access", "warning", text, "Put a proxy that ends TLS in front of it.")
    if config.metrics_access == "open":
        yield Finding("metrics", "warning", "/metrics needs no key on this address")


def _keys(gateway: Gateway) -> Iterator[Finding]:
    tenants, file = gateway.tenants, gateway.config.api_keys_file
    if not tenants.open_to_all and not file:
        advice = "Set gateway.api_keys_file to make and revoke keys while it runs."
        yield Finding("keys", "ok", f"{tenants.num_keys} keys, from the settings", advice)
    for path in (file, gateway.config.admin_keys_file):
        if path and (mode := _mode(path)) is not None and mode & 0o077:
            text = f"{path} can be read by others (mode {mode:03o})"
            yield Finding("keys", "warning", text, f"chmod 600 {path}")


def _limits(gateway: Gateway) -> Iterator[Finding]:
    if gateway.limits.rates.trouble:
        text = "Redis does not answer, so this gateway counts the limits of keys by itself"
        yield Finding("limits", "warning", text, "The log says why Redis does not answer.")


def _open_files(gateway: Gateway) -> Iterator[Finding]:
    most = most_connections(open_files_limit(), gateway.config.max_connections)
    if most < COMFORTABLE_CONNECTIONS:
        text = f"the limit of open files leaves {most} connections"
        yield Finding("open files", "warning", text, "Raise it: ulimit -n 65536")


def _memory(model: ServedModel) -> Iterator[Finding]:
    headroom = model.sessions.headroom
    if headroom.scarce:
        text = "the machine's memory is nearly used up, and no turn is taken"
        yield Finding("memory", "failure", text, "Lower engine.hot_bytes or store.ram_bytes.")
    elif missing := headroom.missing_bytes():
        text = f"free memory is {missing >> 20} MiB below scheduler.memory_low_bytes"
        yield Finding("memory", "warning", text, "Sessions are being moved from memory to disk.")


def _mode(path: str) -> int | None:
    try:
        return stat.S_IMODE(Path(path).stat().st_mode)
    except OSError:
        return None


CHECKS: Final = (_reach, _keys, _limits, _open_files)
MODEL_CHECKS: Final = (_engine, _codec, _tiers, _likeness, _memory)
