"""The Python interpreters that engines run in: ours, and the one that has vLLM.

vLLM has an environment of its own, since it pins hundreds of packages. ``launch/install.sh vllm``
makes one beside the gateway's, in ``.venv-vllm`` of a checkout.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Final

from engines.about_vllm.environment import VllmEnvironment, inspect_environment
from kvstore.config import StoreConfig
from launch.errors import LaunchError

# For every interpreter that we start. Our packages have everyday names: a folder "engines" in the
# user's working directory must not be imported instead of ours.
CHILD_ENV: Final = {"PYTHONSAFEPATH": "1"}

FOLDER: Final = ".venv-vllm"
CHECKOUT: Final = Path(__file__).resolve().parents[2]
INSTALL: Final = (
    "bash launch/install.sh vllm (in a checkout), or set engine.vllm.python to the interpreter"
    " of an environment that has vLLM"
)


def find_python(given: str, checkout: Path = CHECKOUT) -> str:
    """The path of the interpreter to start vLLM with; "" if there is none.

    That is the one that the user named, else that of the installer's environment, else our own.
    """
    if given:
        return str(Path(given).expanduser())
    python = checkout / FOLDER / "bin" / "python"
    if python.exists():
        return str(python)
    return sys.executable if importlib.util.find_spec("vllm") is not None else ""


def require_vllm(python: str, store: StoreConfig) -> VllmEnvironment:
    """The vLLM of this interpreter.

    Raises:
        LaunchError: there is none, or none that we can work with.
    """
    if not python:
        raise LaunchError(f"vLLM is not installed; run: {INSTALL}")
    uses_redis = store.redis_url and store.redis_bytes
    found = inspect_environment(python, ("redis",) if uses_redis else ())
    if found.problem:
        raise LaunchError(found.problem)
    return found
