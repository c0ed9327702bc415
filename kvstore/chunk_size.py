"""How many tokens one blob holds, where no setting says so.

Tokens after the last full chunk stay unpacked, so small chunks are denser for short chats. They
cost calls and entries, and more where a codec shares something among the tokens of a chunk, as the
lanes of an entropy coder. See docs/decisions/0025-chunk-size.md.

The size is a part of every key, so it follows the settings, never what was found in a profile: a
codec that is adopted later, or after a restart, finds the chunks of the one before.
"""

from __future__ import annotations

from typing import Final

from kvstore.codecs.names import CODECS, canonical
from kvstore.config import AUTO, StoreConfig

USUAL_TOKENS: Final = 128
# Of an engine that saves whole blocks and has few tokens after the last one.
SMALL_TOKENS: Final = 32


def chunk_tokens(config: StoreConfig, block_tokens: int = 0) -> int:
    """The same for the codecs of all tiers.

    ``block_tokens``: of an engine that saves whole blocks; then a multiple of it.
    """
    names = (config.codec, config.disk_codec, config.redis_codec)
    own = SMALL_TOKENS if block_tokens and all(map(_packs_tokens_alone, names)) else USUAL_TOKENS
    wanted = config.chunk_tokens or own
    return max(wanted // block_tokens, 1) * block_tokens if block_tokens else wanted


def _packs_tokens_alone(name: str) -> bool:
    """True if small chunks cost no density; nothing is known of a user's own codec."""
    if name in ("", AUTO):
        return True
    try:
        known = CODECS.get(canonical(name))
    except ValueError:  # nothing is known of it; opening it reports what is wrong
        return False
    return known is not None and known.small_chunks
