"""Modules of compiled functions, if numba is installed."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Final

from kvstore.codecs.loops.compilations import COMPILATIONS

logger = logging.getLogger(__name__)

LOOPS: Final = "kvstore.codecs.loops.compiled_loops"


@functools.cache
def compiled_module(name: str) -> ModuleType | None:
    """Imports a module that needs numba; returns None without it, and the log says so once.

    Importing numba takes most of a second: only a process that packs should pay for it.
    """
    try:
        with COMPILATIONS.wait():
            return importlib.import_module(name)
    except ImportError as error:
        _report(str(error))
        return None


@functools.cache
def _report(reason: str) -> None:
    logger.info("codecs run in numpy, slower: %s (install thermocline[fast])", reason)


def holds(comparison: Callable[[], bool], kernels: str) -> bool:
    """Return whether compiled code passes a comparison with its definition.

    Code that raises does not: numpy serves in its place, and the log has the error.
    """
    try:
        return comparison()
    except Exception:  # whichever a compiler, its cache or wrong code raises
        logger.exception("%s fail on this host", kernels)
        return False


def compiled_stages() -> ModuleType | None:
    """Returns the inner loops of stages and of rotations, or None without numba."""
    return compiled_module(LOOPS)
