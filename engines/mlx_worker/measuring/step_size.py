"""How many tokens one step of a measurement feeds, by what steps took.

Every step reads all weights, so long ones are cheaper by the token. Where nobody has asked for
anything for a while, steps are longer; a request that then arrives may have to wait for one.
"""

from __future__ import annotations

from typing import Final

TARGET_S: Final = 0.25  # of a step; a request that arrives may have to wait for it
ALONE_TARGET_S: Final = (
    1.0  # no longer than a step of a prefill, which it may have to wait for, too
)
ALONE_AFTER_S: Final = 30.0
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

    def expect(self, alone_s: float) -> None:
        """Note, before a step, that nobody else has used the model for ``alone_s``."""
        target_s = ALONE_TARGET_S if alone_s >= ALONE_AFTER_S else TARGET_S
        while target_s < self._target_s:  # back at once, not with the next slow step
            self._tokens = max(self._tokens // 2, SMALLEST)
            self._target_s /= 2
        self._target_s = target_s

    def took(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step; one that fed fewer tokens than it might says little."""
        if num_tokens < self._tokens:
            return
        if seconds > self._target_s:
            self._tokens = max(self._tokens // 2, SMALLEST)
        elif 2 * seconds <= self._target_s:
            self._tokens = min(self._tokens * 2, LARGEST)
