"""Adds up what turns used and were spared: today, and over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gateway.live.requests import LiveRequest

RATE_S = 10.0
DAY_S = 86_400


class PrefillSpeed:
    """The engine's speed of prefill, measured on turns whose first token was seen."""

    LEAST_TOKENS = 64  # shorter prompts tell more of the step than of the speed

    def __init__(self) -> None:
        self.told: float | None = None  # by the engine, from when its codecs were measured
        self._seen: float | None = None

    def learn(self, request: LiveRequest) -> None:
        """Learn from a turn. One that was restored tells less: unpacking took some of its time."""
        computed, took_s = request.prefill_seen
        if took_s <= 0 or computed < self.LEAST_TOKENS:
            return
        if request.reused_tokens > computed:
            return
        now, before = computed / took_s, self._seen
        self._seen = now if before is None else 0.8 * before + 0.2 * now

    @property
    def tokens_per_s(self) -> float | None:
        """The speed on turns, else as the engine measured it for its codecs; None if neither is."""
        return self._seen or self.told

    def saved_s(self, request: LiveRequest) -> float | None:
        """Estimate the seconds that a prefill of the reused tokens would have taken longer.

        What restoring took is taken off, as far as it is known; None while no speed is known.
        """
        if not request.reused_tokens:
            return 0.0
        if self.tokens_per_s is None:
            return None
        spared_s = request.reused_tokens / self.tokens_per_s
        computed, took_s = request.computed_tokens, request.prefill_s
        restored = request.cache is not None and request.cache.source != "hot"
        if restored and computed is not None and took_s is not None:
            spared_s -= max(0.0, took_s - computed / self.tokens_per_s)
        return max(0.0, spared_s)


class Tally:
    """One tenant's sums, or everybody's."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._day = int(wall() // DAY_S)
        self._saved_tokens = self._turns = 0
        self._saved_s = 0.0
        self.computed_tokens = 0
        self.answered_tokens = 0
        self.outcomes: dict[str, dict[str, int]] = {}
        self.departures: dict[str, dict[str, int]] = {}
        self._samples: deque[tuple[float, int, int]] = deque()

    def add(self, request: LiveRequest, saved_s: float | None) -> None:
        """Count a turn that is over."""
        self._turn_day()
        self._turns += 1
        self._saved_tokens += request.reused_tokens
        self._saved_s += saved_s or 0.0
        self.computed_tokens += request.computed_tokens or 0
        self.answered_tokens += request.answered_tokens
        if request.cache is not None:
            reasons = self.outcomes.setdefault(request.cache.source, {})
            reason = request.cache.reason or ""
            reasons[reason] = reasons.get(reason, 0) + 1

    def left(self, place: str, why: str) -> None:
        """Count a session whose KV left a place."""
        whys = self.departures.setdefault(place, {})
        whys[why] = whys.get(why, 0) + 1

    @property
    def today(self) -> tuple[int, float, int]:
        """Tokens and seconds that were spared since midnight UTC, and the turns."""
        self._turn_day()
        return self._saved_tokens, round(self._saved_s, 3), self._turns

    def rates(self, now: float, computed: int, answered: int) -> tuple[float, float]:
        """Return tokens a second, computed and answered, over the last ``RATE_S``.

        Args:
            now: in seconds; only differences count.
            computed: all tokens so far, with those of requests that are not over; as ``answered``.
        """
        self._samples.append((now, computed, answered))
        while len(self._samples) > 2 and self._samples[1][0] <= now - RATE_S:
            self._samples.popleft()
        began, computed_then, answered_then = self._samples[0]
        took_s = now - began
        if took_s <= 0:
            return 0.0, 0.0
        return (
            round(max(0, computed - computed_then) / took_s, 1),
            round(max(0, answered - answered_then) / took_s, 1),
        )

    def _turn_day(self) -> None:
        day = int(self._wall() // DAY_S)
        if day != self._day:
            self._day, self._saved_tokens, self._saved_s, self._turns = day, 0, 0.0, 0
