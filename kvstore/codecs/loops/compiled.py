"""The compiled inner loops of stages, if numba is installed."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

logger = logging.getLogger(__name__)


@functools.cache
def compiled_stages() -> ModuleType | None:
    """Returns the module of compiled loops, or None without numba.

    Importing numba takes most of a second: only a process that packs should pay for it.
    """
    try:
        from kvstore.codecs.loops import compiled_loops as compiled
    except ImportError as error:
        logger.info("stages of codecs run in numpy, slower: %s", error)
        return None
    return compiled
