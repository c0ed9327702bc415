"""Checks everything that a server needs, and gives a remedy for each fault.

It starts nothing and downloads nothing. ``CHECKS`` at the end is the list of checks.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import secrets
import socket
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from engines.base import EngineError
from engines.client.control_link import check_control
from engines.vllm_environment.model_files import needs_tool_template, parsers_for, read_model_files
from kvstore.errors import CodecRefused, UnknownCodec
from launch.engine_start import engine_factory
from launch.errors import LaunchError
from launch.families.cache_shape import NotUnderstood
from launch.machine.blas import find_blas
from launch.machine.folders import URL_VARIABLE, compile_environment, server_address, server_folder
from launch.machine.installation import (
    DISTRIBUTION,
    HOME,
    installed,
    require_own_packages,
    require_vllm,
)
from launch.machine.resources import COMFORTABLE, available_memory, free_disk, least_for, too_low
from launch.model.find import find_gguf, find_model
from launch.model.find import folder_in as sample_folder
from launch.plan.cold_size import expected_choice, first_measurement, in_words
from launch.plan.fit import with_capacity
from launch.plan.served_model import check_served, served_cache
from launch.remote.server import describe_server
from launch.serve.preflight import take_port
from launch.serve.sharing import differences_from_redis
from launch.settings.budgets import at_once
from launch.settings.effective_settings import EffectiveSettings, require_installed
from launch.settings.schema import Settings, masked
from launch.settings.units import show_bytes

PINNED = ("mlx", "mlx-lm")
REDIS_DEADLINE_S = 3.0
ATTACH_DEADLINE_S = 3.0

Verdict: TypeAlias = Literal["ok", "warning", "failure"]


class CheckResult(msgspec.Struct, frozen=True):
    """The result of one check."""

    about: str
    verdict: Verdict
    text: str


Result: TypeAlias = tuple[Verdict, str]
Check: TypeAlias = Callable[[EffectiveSettings, Mapping[str, str]], Result]


def examine(effective: EffectiveSettings, environ: Mapping[str, str]) -> list[CheckResult]:
    """Run all checks and return their results.

    Checks that are not in ``OF_THE_MACHINE`` run for each engine; if the results differ, each is
    listed with the engine's name.
    """
    findings: list[CheckResult] = []
    for about, check in CHECKS.items():
        if about in OF_THE_MACHINE:
            findings.append(_finding(about, check, effective, environ))
            continue
        found = {x.entry.name: _finding(about, check, x.effective, environ) for x in effective.each}
        if len({(x.verdict, x.text) for x in found.values()}) == 1:
            findings.append(next(iter(found.values())))
            continue
        for name, finding in found.items():
            findings.append(msgspec.structs.replace(finding, about=f"{about} of {name}"))
    return findings


def _finding(
    name: str, check: Check, effective: EffectiveSettings, environ: Mapping[str, str]
) -> CheckResult:
    try:
        return CheckResult(name, *check(effective, environ))
    except LaunchError as error:
        return CheckResult(name, "failure", str(error))


def _server(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    if found := describe_server(environ):
        return "ok", found
    if url := environ.get(URL_VARIABLE):
        return "warning", f"no Thermocline server answers at {url} (--url, {URL_VARIABLE})"
    return "ok", "no server runs here"


def _python(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    words = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return ("ok" if sys.version_info >= (3, 11) else "failure"), words


def _names(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    require_own_packages()
    if (ours := installed()) is None:
        return "failure", f"{HOME} is not installed; run: bash launch/install.sh"
    return "ok", f"{DISTRIBUTION} {ours.version} in {HOME}"


def _capacity(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    """Check that ``capacity.sessions`` fit; the other checks know only budgets in bytes."""
    return "ok", "; ".join(with_capacity(effective).capacity) or "no --sessions are set"


def _engine(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    kind = effective.engine_kind
    if kind == "vllm":
        return _vllm(effective.settings, environ)
    if replica_list := effective.settings.engine.replica_list:
        return _listed(replica_list)
    if kind == "attached":
        return _attached(effective.settings.engine.url, effective.settings.engine.control)
    require_installed(effective)
    if kind != "mlx":
        engine_factory(kind)
        return "ok", kind
    installed = {name: importlib.metadata.version(name) for name in PINNED}
    wrong = [
        f"{name} {installed[name]} instead of {wanted}"
        for name, wanted in pinned_versions(importlib.metadata.requires(DISTRIBUTION) or []).items()
        if installed[name] != wanted
    ]
    if wrong:
        return "failure", f"{', '.join(wrong)}; run: pip install '{DISTRIBUTION}[mlx]'"
    return "ok", ", ".join(f"{name} {version}" for name, version in installed.items())


def _vllm(settings: Settings, environ: Mapping[str, str]) -> Result:
    python = settings.engine.vllm.python
    found = require_vllm(python, settings.store)
    if "expandable_segments:True" in environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        words = "vLLM refuses expandable segments with our plug-in"
        return "failure", f"{words}; run: unset PYTORCH_CUDA_ALLOC_CONF"
    return "ok", f"vLLM {found.version}{' for CPUs' if found.cpu else ''}, plug-in found, {python}"


def _attached(urls: str, controls: str) -> Result:
    """Check that each engine listens at its control address."""
    words = []
    for url, control in zip_longest(urls.split(), controls.split(), fillvalue=""):
        if not control:
            return (
                "failure",
                f"{url} needs engine.control, too; a vLLM without our plug-in has none",
            )
        try:
            check_control(control)
            _connect(control)
        except EngineError as error:
            return "failure", str(error)
        except (OSError, OverflowError) as error:
            return "failure", f"nothing listens at {control}, the control address of {url}: {error}"
        words.append(f"{url}, and {control} listens")
    return "ok", "; ".join(words)


def _connect(address: str) -> None:
    """Connect to a control address and disconnect. Raises ``OSError``, ``OverflowError``."""
    scheme, _, rest = address.partition(":")
    if scheme != "unix":
        host, _, port = rest.removeprefix("//").rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), ATTACH_DEADLINE_S).close()
        return
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(rest)


def _listed(url: str) -> Result:
    """Check that a server listens at the address of the list of replicas."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), ATTACH_DEADLINE_S).close()
    except (OSError, ValueError) as error:
        return "failure", f"nothing listens at engine.replica_list {url}: {error}"
    return "ok", f"{url} serves the list of replicas"


def pinned_versions(requirements: Sequence[str]) -> dict[str, str]:
    """Find pinned versions: ``["mlx[cpu]==0.32.4; ...", "numpy>=1"]`` -> ``{"mlx": "0.32.4"}``."""
    found = (re.match(r"([\w-]+)(?:\[[\w,]+\])?==([\w.]+)", line) for line in requirements)
    return {x[1]: x[2] for x in found if x and x[1] in PINNED}


def _blas(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    if effective.engine_kind != "mlx":
        return "ok", "not needed"
    blas = find_blas(environ, effective.folders.cache)
    return ("ok" if blas.fast else "warning"), blas.message.removeprefix("BLAS: ")


def _private_folders(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    """Check the folders into which engines compile code and from which they load it."""
    if effective.engine_kind == "attached":
        return "ok", "left to the engine"
    cache = effective.folders.cache
    compile_environment(cache, environ)
    with server_folder(cache, environ) as folder:
        return "ok", f"{cache / 'compiled'} and {folder.parent}, for this user alone"


def _memory(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    available = available_memory()
    settings = effective.settings
    # Only live KV in this machine's own memory counts, and only of engines loaded at once.
    own = [
        0 if x.effective.hot_on_gpu else x.effective.settings.engine.hot_bytes
        for x in effective.each
    ]
    hot_bytes = at_once([x.entry for x in effective.each], settings.capacity.on_demand, own)
    wanted = hot_bytes + settings.store.ram_bytes
    what = "hot and ram together" if hot_bytes else "ram"
    words = f"{show_bytes(available)} available; {what} may take {show_bytes(wanted)}"
    if kept := settings.scheduler.memory_low_bytes:
        words += f"; {show_bytes(kept)} have to stay free"
        wanted += kept
    if wanted > available:
        return "failure", f"{words}; lower engine.hot_bytes or store.ram_bytes"
    return ("ok" if wanted < 0.8 * available else "warning"), words


def _disk(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    store = effective.settings.store
    folder = Path(store.disk_path or effective.folders.data).expanduser()
    parent = next(x for x in (folder, *folder.parents) if x.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        return "failure", f"{parent} cannot be written by this user; choose another --data-dir"
    secret = effective.folders.data / "secret"
    if secret.exists() and stat.S_IMODE(secret.stat().st_mode) & 0o077:
        return "failure", f"other users can read the server's secret; run: chmod 600 {secret}"
    free = free_disk(folder)
    words = f"{show_bytes(free)} free in {folder}; cold sessions may take "
    words += show_bytes(store.disk_bytes)
    return ("ok" if store.disk_bytes < free else "warning"), words


def _port(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    gateway = effective.settings.gateway
    named = urlsplit(server_address(environ))
    is_here = named.hostname in ("127.0.0.1", "::1", "localhost", gateway.host)
    if is_here and named.port == gateway.port and describe_server(environ):
        return "ok", f"{gateway.host} port {gateway.port} is that of the server which runs here"
    take_port(gateway).close()
    return "ok", f"{gateway.host} port {gateway.port} is free"


def _redis(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    url = effective.settings.store.redis_url
    if not url:
        return "ok", "not used"
    try:
        import redis

        from kvstore.tiers.redis_server.client import RedisServers, read_bounds
    except ImportError:
        return "failure", f"redis-py is missing; run: pip install '{DISTRIBUTION}[redis]'"
    try:
        with closing(RedisServers(url, REDIS_DEADLINE_S)) as servers:
            key = f"thermocline.doctor:{secrets.token_hex(8)}"
            server = servers.node_of(key)
            version = server.info("server").get("redis_version")
            # Write a key: a read-only replica and a node of a cluster would answer questions, too.
            server.set(key, b"", ex=1)
            trouble = read_bounds(servers.client()).trouble
    except redis.ResponseError as error:
        return "failure", f"{masked('', url)} refuses writes: {error}"
    except (redis.RedisError, OSError, ValueError) as error:
        return "failure", f"{masked('', url)} does not answer: {error}"
    words = f"{masked('', url)}, version {version}"
    return ("warning", f"{words}: {trouble}") if trouble else ("ok", words)


def _redis_data(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    """Compare the data that this server would store with the data on its Redis."""
    if not effective.settings.store.redis_url:
        return "ok", "no Redis is shared with other servers"
    if not effective.is_ours:
        return "ok", "left to the engine"
    if found := differences_from_redis(effective, environ, REDIS_DEADLINE_S):
        return "warning", "; ".join(found)
    return "ok", "nothing on this Redis differs from this server's data"


def _lacks_sample(effective: EffectiveSettings) -> bool:
    """Return True if the sample model is to be served and was not converted yet."""
    return (
        not effective.settings.engine.model and not sample_folder(effective.folders.cache).exists()
    )


def _model(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    if effective.engine_kind in ("attached", "fake"):
        return "ok", "left to the engine"
    if _lacks_sample(effective):
        find_gguf()
        return "ok", "the sample model; converted at the first start (about 20 seconds)"
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    model.require_weights()
    if model.folder is None:
        return "ok", f"{model.name}: not on this machine yet; the engine fetches it"
    check_served(effective, model)
    try:
        shape = served_cache(effective, model.config())
    except NotUnderstood as error:
        return "warning", f"{model.name}: no capacity plan: {error}"
    kept = f"{len(shape.growing)} growing layers"
    return "ok", f"{model.name}: {kept}{', and state' if shape.needs_state else ''}"


def _tools(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    """Report how the engine will parse this model's tool calls."""
    if effective.engine_kind != "vllm":
        return "ok", "the engine reads tool calls by its own parsers"
    if _lacks_sample(effective):
        return "ok", "the sample model is not here yet"
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    files = read_model_files(model.folder)
    chosen = parsers_for(files)
    text = f"vLLM reads tool calls by its parser {chosen.tool_calls}"
    text += f", reasoning by {chosen.reasoning}" if chosen.reasoning else ""
    if needs_tool_template(files, chosen):
        text += "; the chat template has no tools: the system message describes them"
    return "ok", text


def _codec(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    if not effective.is_ours:
        return "ok", "left to the engine"
    given = effective.settings.store.codec
    if _lacks_sample(effective):
        return "ok", f"{given}; the sample model is not here yet"
    try:
        choice = expected_choice(effective)
    except (CodecRefused, UnknownCodec) as error:
        return "failure", str(error)
    except NotUnderstood:  # the engine looks at the real cache and decides for itself
        return "ok", given
    text = in_words(choice)
    if not choice.unmeasured:
        return "ok", text
    outlook = first_measurement(effective)
    return "ok" if outlook.will_be else "warning", f"{text}; {outlook.text}"


def _open_files(effective: EffectiveSettings, environ: Mapping[str, str]) -> Result:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # ``serve`` raises the soft limit to it
    if limit == resource.RLIM_INFINITY:
        return "ok", "any number allowed"
    if limit < least_for(effective.engine_kind):
        return "failure", too_low(limit, effective.engine_kind)
    if limit < COMFORTABLE:
        return "warning", f"{limit} allowed, few for connections; run: ulimit -Hn {COMFORTABLE}"
    return "ok", f"{limit} allowed"


CHECKS: Mapping[str, Check] = {
    "server": _server,
    "python": _python,
    "package": _names,
    "engine": _engine,
    "model": _model,
    "tools": _tools,
    "codec": _codec,
    "capacity": _capacity,
    "folders": _private_folders,
    "blas": _blas,
    "memory": _memory,
    "disk": _disk,
    "redis": _redis,
    "redis data": _redis_data,
    "port": _port,
    "open files": _open_files,
}
# Checks of the machine, which run once for all engines.
OF_THE_MACHINE = ("server", "memory", "port", "redis")
