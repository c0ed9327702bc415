"""Computes how many bytes of blobs an LMDB file of a given size holds, and the reverse.

LMDB never overwrites live pages, so besides the blobs its file needs room for

* the next commit, and the pages that the two commits before it freed, which LMDB cannot reuse yet;
* free pages too scattered for a fragment (8 % of the live bytes under steady eviction);
* the tree's own pages.

LMDB's memory map ends at the limit, so the file stays within it even if this estimate is wrong. If
blobs of unusual sizes need more, the tier evicts more.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from kvstore.errors import TierUnavailable

MIN_FILE_BYTES: Final = 4 << 20
MOST_BATCH_BYTES: Final = 32 << 20  # LMDB holds a commit's pages in memory until it is made
_LEAST_BATCH_BYTES: Final = 256 << 10
_TREE_BYTES: Final = 256 << 10
_MAP_STEP: Final = 1 << 16  # a multiple of every page size


def batch_bytes(capacity_bytes: int) -> int:
    """Return the most bytes of blobs in one commit, unless a single blob is larger."""
    return max(_LEAST_BATCH_BYTES, min(MOST_BATCH_BYTES, capacity_bytes // 32))


def file_bytes_limit(capacity_bytes: int) -> int:
    """Return the size in bytes that data.mdb never exceeds with ``capacity_bytes`` of blobs."""
    limit = capacity_bytes + capacity_bytes // 12 + 2 * batch_bytes(capacity_bytes) + _TREE_BYTES
    return limit // _MAP_STEP * _MAP_STEP


def capacity_within(file_bytes: int) -> int:
    """Return the most bytes of blobs with which data.mdb stays within ``file_bytes``.

    Raises:
        TierUnavailable: ``file_bytes`` is below ``MIN_FILE_BYTES``.
    """
    if file_bytes < MIN_FILE_BYTES:
        raise TierUnavailable(
            f"disk_bytes is {file_bytes}, too little for a disk tier: "
            f"give it {MIN_FILE_BYTES >> 20} MiB or more, or 0 to turn it off"
        )
    return bisect_right(range(file_bytes), file_bytes, key=file_bytes_limit) - 1
