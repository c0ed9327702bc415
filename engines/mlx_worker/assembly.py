"""Puts the parts of the owner thread together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engines.config import EngineConfig
from engines.mlx_worker.arrivals import Arrivals
from engines.mlx_worker.batching import Batches
from engines.mlx_worker.cold import Cold
from engines.mlx_worker.hot import HotSessions
from engines.mlx_worker.keeping import Keeper, Tell
from engines.mlx_worker.layout import CachePlan
from engines.mlx_worker.prefill import Feeder
from engines.mlx_worker.room import Room
from engines.mlx_worker.serving import Serving
from engines.mlx_worker.stream import Outbox
from engines.mlx_worker.turn import Prompt
from engines.mlx_worker.waiting import Places


@dataclass(frozen=True)
class Surroundings:
    """What the parts need of the thread they live on."""

    outbox: Outbox
    places: Places
    post: Callable[[Callable[[], None]], None]
    tell: Tell
    clock: Callable[[], float]


@dataclass(frozen=True)
class Parts:
    arrivals: Arrivals
    serving: Serving
    keeper: Keeper
    batches: Batches
    admitted: dict[Prompt, None]  # prompts on their way into a batch
    cold: Cold | None


def assemble(
    model: Any, plan: CachePlan, cold: Cold | None, config: EngineConfig, around: Surroundings
) -> Parts:
    admitted: dict[Prompt, None] = {}
    hot = HotSessions(around.clock)
    keeper = Keeper(hot, cold, around.tell, nudge=lambda: around.post(lambda: None))
    feeder = Feeder(model, config.prefill_step)
    batches = Batches(model, config.max_batch)
    room = Room(config.hot_bytes, config.max_batch, plan.cost, batches, hot, admitted)
    arrivals = Arrivals(
        model=model,
        plan=plan,
        cold=cold,
        keeper=keeper,
        room=room,
        feeder=feeder,
        admitted=admitted,
        places=around.places,
        outbox=around.outbox,
        post=around.post,
        tell=around.tell,
        clock=around.clock,
    )
    serving = Serving(
        arrivals=arrivals,
        feeder=feeder,
        batches=batches,
        admitted=admitted,
        room=room,
        keeper=keeper,
        outbox=around.outbox,
        tell=around.tell,
    )
    return Parts(arrivals, serving, keeper, batches, admitted, cold)
