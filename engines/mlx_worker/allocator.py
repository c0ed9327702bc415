"""Has the C library give freed memory back to the system.

glibc keeps blocks below a threshold in heaps, which shrink only at their ends, and above it gives
each block a mapping of its own. Whenever such a block is freed it raises the threshold, up to 32
MiB. From then on mlx's short-lived buffers and the packed blobs of the RAM tier, a mebibyte or so
each and kept for hours, lie mixed in the heaps, and the holes between them stay resident. Measured
with 32 users, several turns each: 70 MiB of holes after half a minute, 250 after five. With a fixed
threshold it was 30 to 70 throughout, and as many turns were served.
"""

from __future__ import annotations

import ctypes
from typing import Final

# The threshold that glibc starts with.
LARGE_BLOCK_BYTES: Final = 128 << 10
# Half of Linux's default limit for a process. Beyond it large blocks go to the heaps again.
MAX_MAPPINGS: Final = 32_768

# malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4


def return_large_blocks() -> bool:
    """Make glibc return large freed blocks to the system; False if the C library is another."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    settings = {
        _M_MMAP_THRESHOLD: LARGE_BLOCK_BYTES,
        _M_TRIM_THRESHOLD: LARGE_BLOCK_BYTES,  # it rises along, and stays where it is
        _M_MMAP_MAX: MAX_MAPPINGS,
    }
    return all(libc.mallopt(name, value) for name, value in settings.items())
