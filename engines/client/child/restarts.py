"""Decides when a process that ended is started again. Pure logic: no process, no clock."""

from __future__ import annotations

from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class RestartRules(msgspec.Struct, frozen=True, kw_only=True):
    """The delays between restarts, and what counts as a crash loop."""

    first_delay_s: Seconds = 0.5
    longest_delay_s: Seconds = 30.0
    # A process that lived this long was fine: if it ends, the delays begin again.
    stable_after_s: Seconds = 60.0
    # So many short lives in a row are a crash loop, so many ends of one kind are hopeless.
    loop_after: int = 5


class RestartPolicy:
    """Doubles the delay with every short life, up to a cap; a long life resets it."""

    def __init__(self, rules: RestartRules | None = None) -> None:
        self._rules = rules or RestartRules()
        self._started_at = 0.0
        self._num_short_lives = 0
        self._last_end = ""
        self._num_alike = 0

    @property
    def hopeless(self) -> bool:
        """True after too many ends of one kind in a row, however long those lives were."""
        return self._num_alike >= self._rules.loop_after

    @property
    def num_alike(self) -> int:
        return self._num_alike

    @property
    def crash_looping(self) -> bool:
        """True after too many short lives in a row."""
        return self._num_short_lives >= self._rules.loop_after

    @property
    def num_short_lives(self) -> int:
        return self._num_short_lives

    def started(self, now: float) -> None:
        """Note a start. Times are in seconds, by any one clock."""
        self._started_at = now

    def ended(self, now: float, how: str) -> float:
        """Note an end; return the seconds to wait before the next start."""
        rules = self._rules
        self._num_alike = self._num_alike + 1 if how == self._last_end else 1
        self._last_end = how
        if now - self._started_at >= rules.stable_after_s:
            self._num_short_lives = 0
        delay_s = rules.first_delay_s * float(2 ** min(self._num_short_lives, 32))
        self._num_short_lives += 1
        return min(rules.longest_delay_s, delay_s)
