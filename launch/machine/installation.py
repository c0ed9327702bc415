"""Checks that our Python packages are our own, and finds the interpreter that has vLLM.

Our packages have generic names, and an installer silently overwrites files of another distribution.
So a server checks at its start that the packages and their files come from our distribution.

vLLM has its own environment, since it pins hundreds of packages. ``launch/install.sh vllm`` makes
one beside the gateway's, in ``.venv-vllm`` of a checkout.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, FileHash, PackageNotFoundError, PackagePath
from pathlib import Path
from typing import Final

from engines.vllm_environment.environment import OUR_PACKAGES, VllmEnvironment, inspect_environment
from kvstore.config import StoreConfig
from launch.errors import LaunchError

DISTRIBUTION: Final = "thermocline"
HOME: Final = Path(__file__).resolve().parents[2]
_ADVICE: Final = f"give {DISTRIBUTION} an environment of its own, and install it there"
# For every interpreter that we start: a folder "engines" in the user's working directory must not
# be imported instead of our package.
CHILD_ENV: Final = {"PYTHONSAFEPATH": "1"}
FOLDER: Final = ".venv-vllm"
INSTALL: Final = (
    "bash launch/install.sh vllm (in a checkout), or set engine.vllm.python to the interpreter"
    " of an environment that has vLLM"
)


def require_own_packages() -> None:
    """Check that none of our packages was replaced or changed.

    Raises:
        LaunchError: one was; the message names the other distribution, or the file.
    """
    if found := [*_other_distributions(), *_elsewhere()] or [*_changed_files()]:
        raise LaunchError(f"{'; '.join(found)}; {_ADVICE}")


def installed() -> Distribution | None:
    """Our own distribution; None in a checkout that is not installed."""
    try:
        return importlib.metadata.distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def _other_distributions() -> Iterator[str]:
    """Yield a message for each other distribution that has a package of one of our names."""
    owners: dict[str, set[tuple[str, str]]] = {package: set() for package in OUR_PACKAGES}
    for one in importlib.metadata.distributions():
        for package in owners.keys() & _top_level_names(one):
            owners[package].add((one.name, one.version))
    for package, found in owners.items():
        for name, version in sorted(x for x in found if x[0] != DISTRIBUTION):
            yield f"the distribution {name} {version} has a package {package!r}, as we have"


def _top_level_names(distribution: Distribution) -> set[str]:
    """Return the names that a distribution lets one import.

    ``importlib.metadata.packages_distributions`` finds the same, but takes half a second.
    """
    names = {*(distribution.read_text("top_level.txt") or "").split()}
    record = distribution.read_text("RECORD")
    lines = record.splitlines() if record else map(str, distribution.files or ())
    for line in lines:
        top, is_folder, _ = line.partition("/")
        names.add(top if is_folder else inspect.getmodulename(top.partition(",")[0]) or "")
    return names


def _elsewhere() -> Iterator[str]:
    """Yield a message for each package that Python would not import from this folder."""
    for package in OUR_PACKAGES:
        spec = importlib.util.find_spec(package)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        if origin is None or origin.parent.parent != HOME:
            yield f"the package {package!r} is {origin or 'missing'}"


def _changed_files() -> Iterator[str]:
    """Yield a message for the first file of a wheel whose hash is not the one in its RECORD.

    A checkout has no such hashes, since its files are meant to change.
    """
    ours = installed()
    for file in (ours and ours.files) or ():
        if file.parts[0] in OUR_PACKAGES and file.hash and not _is_as_installed(file, file.hash):
            yield f"{file.locate()} is not the file that was installed with {DISTRIBUTION}"
            return


def _is_as_installed(file: PackagePath, recorded: FileHash) -> bool:
    try:
        digest = hashlib.new(recorded.mode, file.read_binary()).digest()
    except OSError:
        return False
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == recorded.value


def find_python(given: str, checkout: Path = HOME) -> str:
    """Return the path of the interpreter with which to start vLLM; "" if there is none.

    It is the one that the user named, else that of the installer's environment, else our own.
    """
    if given:
        return str(Path(given).expanduser())
    python = checkout / FOLDER / "bin" / "python"
    if python.exists():
        return str(python)
    return sys.executable if importlib.util.find_spec("vllm") is not None else ""


def require_vllm(python: str, store: StoreConfig) -> VllmEnvironment:
    """Return a description of the vLLM of this interpreter.

    Raises:
        LaunchError: it has no vLLM, or one that we do not support.
    """
    if not python:
        raise LaunchError(f"vLLM is not installed; run: {INSTALL}")
    found = inspect_environment(python, ("redis",) if store.redis_url else ())
    if found.problem:
        raise LaunchError(found.problem)
    return found
