"""Settings of the scheduler. Frozen; read from the environment only by ``launch``."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits that decide when sessions sleep and how many turns may run or wait."""

    idle_after_s: Seconds = 120.0  # a session this quiet hibernates
    # Turns inside the engine, and one more for a tenant with nothing running. 0 = as many as the
    # engine computes together (``engine.max_batch``), or 64 where it runs elsewhere.
    max_running: NonNegative = 0
    # With less memory left, of the machine's or of a container's limit, quiet sessions move from
    # memory to disk; see the marks below. 0 = never.
    memory_low_bytes: NonNegative = 0

    # Constants, not settings: these values suit every installation. Tests override them in a
    # subclass.
    #
    # The longest wait, in our line and the engine's together; agents' clients wait about this long.
    max_wait_s: ClassVar[float] = 120.0
    # Turns in line. If one place serves a turn a second, 120 are served within ``max_wait_s``.
    max_waiting: ClassVar[int] = 256
    # Rows of the table, of a few hundred bytes each; the longest idle row is dropped first.
    max_sessions: ClassVar[int] = 200_000
    # Above high water (a share of the engine's hot bytes) idle sessions hibernate, the least
    # valuable first, until low water is reached. The room above high water serves turns that begin
    # meanwhile; the room between the marks can fill up before the next sweep is due.
    high_water: ClassVar[float] = 0.85
    low_water: ClassVar[float] = 0.65
    value_half_life_s: ClassVar[float] = 600.0  # idle time that halves a session's claim to be hot

    @property
    def max_hibernations(self) -> int:
        """The most sessions put to sleep at once; as many more if memory is short."""
        return max(4, self.max_running // 4)

    @property
    def max_prefetches(self) -> int:
        """The most prefetches at once: fewer, since each takes room from running turns."""
        return max(2, self.max_running // 8)

    @property
    def memory_stop_bytes(self) -> int:
        """The mark below which no turn is admitted; 0 = never."""
        return self.memory_low_bytes * 3 // 4

    @property
    def memory_end_bytes(self) -> int:
        """The mark below which the engine is ended and restarted; 0 = never."""
        return self.memory_low_bytes // 2
