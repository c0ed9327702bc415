"""Settings of the scheduler. Frozen; read from the environment only by ``launch``."""

from __future__ import annotations

from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits that decide when sessions sleep and how many turns may run or wait."""

    idle_after_s: Seconds = 120.0  # a session this quiet hibernates
    # Above high water (a share of the engine's hot bytes) idle sessions hibernate, the least
    # valuable first, until low water is reached.
    high_water: Fraction = 0.85
    low_water: Fraction = 0.65
    max_hibernations: Positive = 4  # at once, and as many more when memory is short
    max_prefetches: Positive = 2  # at once
    # Turns inside the engine, and one more for a tenant with nothing running. 0 = as many as the
    # engine computes together (``engine.max_batch``), or 64 where it runs elsewhere.
    max_running: NonNegative = 0
    max_waiting: NonNegative = 256
    max_wait_s: PositiveSeconds = 120.0
    max_sessions: Positive = 100_000  # rows of the table; the longest idle is dropped from it first
    value_half_life_s: PositiveSeconds = 600.0  # idle time that halves a session's claim to be hot
    # Marks for the memory that the machine, or a container's limit, has left. Below the first,
    # quiet sessions move from memory to disk; below the second, no turn is admitted; below the
    # third, the engine is ended and restarted. 0 = never.
    memory_low_bytes: NonNegative = 0
    memory_stop_bytes: NonNegative = 0
    memory_end_bytes: NonNegative = 0

    def __post_init__(self) -> None:
        if self.low_water >= self.high_water:
            raise ValueError(
                f"scheduler.low_water ({self.low_water}) must be below "
                f"scheduler.high_water ({self.high_water})"
            )
        self._check_memory_marks()

    def _check_memory_marks(self) -> None:
        """Check that each mark is below the one before it. Raises ``ValueError``."""
        upper, above = "memory_low_bytes", self.memory_low_bytes
        for name in ("memory_stop_bytes", "memory_end_bytes"):
            nbytes = getattr(self, name)
            if nbytes and nbytes >= above:
                raise ValueError(
                    f"scheduler.{name} ({nbytes}) must be below scheduler.{upper} ({above})"
                )
            if nbytes:
                upper, above = name, nbytes
