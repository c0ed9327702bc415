"""The compiled inner loops of pieces, where numba is installed."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

logger = logging.getLogger(__name__)


@functools.cache
def compiled_pieces() -> ModuleType | None:
    """Importing numba takes most of a second: only who packs shall pay for it."""
    try:
        from kvstore.codecs.pieces import compiled
    except ImportError as error:
        logger.info("pieces of codecs run in numpy, slower: %s", error)
        return None
    return compiled
