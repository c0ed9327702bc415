"""The number of tokens in a chunk: one size for every codec and both engines.

Every codec packs each token by itself, so that small chunks are as dense as large ones; see
docs/decisions/0089-chains-of-chunks.md for the measurements. The size is a part of every name.
"""

from __future__ import annotations

from typing import Final

CHUNK_TOKENS: Final = 32


def chunk_of_blocks(block_tokens: int) -> int:
    """Return the chunk size of an engine with blocks of its own: whole blocks, at least one."""
    return max(CHUNK_TOKENS // block_tokens, 1) * block_tokens
