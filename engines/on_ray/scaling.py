"""Chooses the number of replicas by the waiting requests and by the share of live KV in use.

Serve counts only requests through its own proxies, which the gateway bypasses. So each replica
reports its figures (``record_autoscaling_stats``). Serve's bounds and delays stay as they are set
in ``autoscaling_config``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

WAITING: Final = "waiting"  # requests in a replica's line
RUNNING: Final = "running"
HOT_SHARE: Final = "hot_share"  # the part of the live KV that running requests take, 0 to 1
HIGH: Final = 0.85  # above this share, requests will soon wait
AIM: Final = 0.7  # the share after more replicas were started
IDLE: Final = 0.35  # a replica is ended if the others then stay below this share


def by_waiting_and_heat(context: Any) -> tuple[int, dict[str, Any]]:
    """Choose the number of replicas; ``context``: Serve's ``AutoscalingContext``."""
    figures = context.aggregated_metrics or {}
    wanted = replicas_for(
        context.target_num_replicas,
        waiting=_sum(figures.get(WAITING)),
        running=_sum(figures.get(RUNNING)),
        hot_shares=_sum(figures.get(HOT_SHARE)),
    )
    return wanted, {}


def replicas_for(now: int, *, waiting: float, running: float, hot_shares: float) -> int:
    """Return the number of replicas for these figures, each a sum over the replicas.

    Waiting requests add replicas in proportion to the running ones, by half of ``now`` at most; if
    live KV is nearly full, there are as many replicas as bring it down to ``AIM``.
    """
    now = max(1, now)
    if waiting >= 1:
        return now + max(1, math.ceil(now * min(1.0, waiting / max(1.0, running)) / 2))
    if hot_shares > HIGH * now:
        return max(now + 1, math.ceil(hot_shares / AIM))
    if now > 1 and hot_shares < IDLE * (now - 1):
        return now - 1
    return now


def _sum(by_replica: Mapping[Any, float] | None) -> float:
    return sum((by_replica or {}).values())
