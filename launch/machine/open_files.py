"""The number of files that this process and its engine may have open, connections included.

mlx_lm sets the hard limit to 4,096 when it is imported, which the system forbids to a process whose
hard limit is lower: the engine would fail at each start. So the limit is looked at, and raised
where that is allowed, before anything is started.
"""

from __future__ import annotations

import resource

from launch.errors import LaunchError

LEAST = 256  # the engine's, the logs', and a few connections
COMFORTABLE = 1024
MLX_LM_SETS = 4096
MOST = 1 << 20  # where the hard limit is none


def raise_open_files(engine_kind: str) -> int:
    """Raise the soft limit to the hard one, and for mlx_lm the hard one, too; return the soft one.

    Raises:
        LaunchError: too few files may be open, and this process may not raise that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = least_for(engine_kind)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        try:  # only a privileged process may
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        except (ValueError, OSError):
            raise LaunchError(too_low(hard, engine_kind)) from None
        return wanted
    most = MOST if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (ValueError, OSError):  # macOS has a lower limit of its own, which it does not report
        if soft < LEAST:
            raise LaunchError(too_low(soft, engine_kind)) from None
        return soft
    return most


def least_for(engine_kind: str) -> int:
    """Return the hard limit below which a server with this engine cannot work."""
    return MLX_LM_SETS if engine_kind == "mlx" else LEAST


def too_low(limit: int, engine_kind: str) -> str:
    """Say why a limit is too low, and how to raise it."""
    wanted = least_for(engine_kind)
    why = " (mlx_lm asks for that when it is imported)" if engine_kind == "mlx" else ""
    return (
        f"only {limit} files may be open, and {wanted} are needed{why}; raise the hard limit:"
        f" ulimit -Hn {wanted}, LimitNOFILE={wanted} in a systemd unit, or --ulimit"
        f" nofile={wanted} of a container"
    )
