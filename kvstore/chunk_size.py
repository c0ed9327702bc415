"""How many tokens one blob holds, where nobody has said so.

What is behind the last full chunk stays unpacked, so small chunks are denser for short chats. They
cost calls and entries, and more where a codec shares something among the tokens of a chunk: the
tables of an entropy coder, a basis. See docs/decisions/0025-chunk-size.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.codecs.base import Codec
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.row_codec import RowCodec
from kvstore.config import StoreConfig

USUAL_TOKENS: Final = 128
# Of an engine that saves whole blocks and has few tokens left behind the last one.
SMALL_TOKENS: Final = 32


def chunk_tokens(config: StoreConfig, codecs: Iterable[Codec], block_tokens: int = 0) -> int:
    """For ``codecs``, of all tiers: they have the same chunks.

    ``block_tokens``: of an engine that saves whole blocks; then a multiple of it.
    """
    pack_rows_alone = all(isinstance(x, RowCodec | RawCodec) for x in codecs)
    own = SMALL_TOKENS if block_tokens and pack_rows_alone else USUAL_TOKENS
    wanted = config.chunk_tokens or own
    return max(wanted // block_tokens, 1) * block_tokens if block_tokens else wanted
