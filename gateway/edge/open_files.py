"""The limit of open files, and how many of them may be connections."""

from __future__ import annotations

import resource

MAX_CONNECTIONS = 16_384  # where the limit of open files would allow more
# Files that are no connections of clients: one to the engine for each turn that runs, the engine's
# own, logs, and those that are about to be refused.
_RESERVED_LEAST = 192
_RESERVED_MOST = 1024


def open_files_limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def most_connections(num_files: int, wanted: int) -> int:
    """Return how many connections may be open, at least one.

    Args:
        wanted: the setting; 0 = as many as suits.
    """
    reserved = min(max(num_files // 4, _RESERVED_LEAST), _RESERVED_MOST)
    return max(1, min(wanted or MAX_CONNECTIONS, num_files - reserved))
