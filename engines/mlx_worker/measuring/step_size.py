"""How many tokens one step of a measurement feeds, by what steps took."""

from __future__ import annotations

from typing import Final

TARGET_S: Final = 0.25  # of a step; a request that arrives may have to wait for it
SMALLEST: Final = 8
LARGEST: Final = 512
FIRST: Final = 32


class StepSize:
    """A number of tokens, a power of two: halved after slow steps, doubled after quick ones."""

    def __init__(self, target_s: float = TARGET_S, first: int = FIRST) -> None:
        """``target_s``: seconds that a step may take. ``first``: tokens of the first one."""
        self._target_s = target_s
        self._tokens = first

    @property
    def tokens(self) -> int:
        """Tokens of the next step."""
        return self._tokens

    def took(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step; one that fed fewer tokens than it might says little."""
        if num_tokens < self._tokens:
            return
        if seconds > self._target_s:
            self._tokens = max(self._tokens // 2, SMALLEST)
        elif 2 * seconds <= self._target_s:
            self._tokens = min(self._tokens * 2, LARGEST)
