"""The bytes that a rank keeps with a session's record for readers of KV events.

They know blocks by vLLM's hashes and by token ids, which the cold store does not. So each chunk has
a note: the hashes of its blocks, and the ids of its tokens. Without KV events there are none.
"""

from __future__ import annotations

from typing import Final

from kvstore.blobs.chain import joined, split

HASH_BYTES: Final = 32


def written(hashes: list[bytes], ids: bytes, chunk_blocks: int) -> bytes:
    """Make the note of a chain of blocks; b"" without ids. ``ids``: of all their tokens."""
    if not ids or not hashes:
        return b""
    size = len(ids) // len(hashes) * chunk_blocks
    return b"".join(
        joined(hashes[i : i + chunk_blocks]) + ids[i // chunk_blocks * size :][:size]
        for i in range(0, len(hashes), chunk_blocks)
    )


def read(note: bytes, num_chunks: int, chunk_blocks: int) -> tuple[list[bytes], bytes]:
    """Return the hashes of all blocks and the ids of their tokens that ``written`` wrote."""
    if not note or not num_chunks:
        return [], b""
    size, of_hashes = len(note) // num_chunks, HASH_BYTES * chunk_blocks
    parts = [note[i : i + size] for i in range(0, len(note), size)]
    hashes = [x for part in parts for x in split(part[:of_hashes])]
    return hashes, b"".join(part[of_hashes:] for part in parts)
