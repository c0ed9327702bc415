"""When a process that ended is started again. Pure logic: no process, no clock of its own."""

from __future__ import annotations

from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class RestartRules(msgspec.Struct, frozen=True, kw_only=True):
    first_delay_s: Seconds = 0.5
    longest_delay_s: Seconds = 30.0
    # A process that lived this long was fine: what comes next is a new trouble, not the old one.
    stable_after_s: Seconds = 60.0
    loop_after: int = 5  # short lives in a row that are called a crash loop


class RestartPolicy:
    """Doubling delays, capped; forgotten after a long enough life."""

    def __init__(self, rules: RestartRules | None = None) -> None:
        self._rules = rules or RestartRules()
        self._started_at = 0.0
        self._num_short_lives = 0

    @property
    def crash_looping(self) -> bool:
        return self._num_short_lives >= self._rules.loop_after

    @property
    def num_short_lives(self) -> int:
        return self._num_short_lives

    def started(self, now: float) -> None:
        self._started_at = now

    def ended(self, now: float) -> float:
        """Seconds to wait before the next start."""
        rules = self._rules
        if now - self._started_at >= rules.stable_after_s:
            self._num_short_lives = 0
        delay_s = rules.first_delay_s * float(2 ** min(self._num_short_lives, 32))
        self._num_short_lives += 1
        return min(rules.longest_delay_s, delay_s)
