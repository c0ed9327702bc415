"""Chooses how many tokens one blob holds, unless a setting does.

Small chunks cost calls and entries, and density where a codec shares data among the tokens of a
chunk, such as the lanes of an entropy coder. In return less is packed again when a session grows.
See docs/decisions/0025-chunk-size.md for the measurements with unpacked tails.

The size is a part of every key, so it depends on the settings, never on the contents of a profile:
a codec that is adopted later, or after a restart, finds the chunks of the codec before it.
"""

from __future__ import annotations

from typing import Final

from kvstore.codecs.names import CODECS, canonical
from kvstore.config import AUTO, StoreConfig

USUAL_TOKENS: Final = 128
# For an engine that saves whole blocks and has few tokens after the last one.
SMALL_TOKENS: Final = 32


def chunk_tokens(config: StoreConfig, block_tokens: int = 0) -> int:
    """Return the chunk size, which is the same for the codecs of all tiers.

    ``block_tokens``: of an engine that saves whole blocks; the result is then a multiple of it.
    """
    names = (config.codec, config.disk_codec, config.redis_codec)
    own = SMALL_TOKENS if block_tokens and all(map(_packs_tokens_alone, names)) else USUAL_TOKENS
    wanted = config.chunk_tokens or own
    return max(wanted // block_tokens, 1) * block_tokens if block_tokens else wanted


def _packs_tokens_alone(name: str) -> bool:
    """True if small chunks cost no density. False for a user's own codec, which is unknown here."""
    if name in ("", AUTO):
        return True
    try:
        known = CODECS.get(canonical(name))
    except ValueError:  # an unknown codec; opening it reports the error
        return False
    return known is not None and known.small_chunks
